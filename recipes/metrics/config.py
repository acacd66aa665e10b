"""What a run reports beside its console and its metrics file."""

import importlib.util
from dataclasses import dataclass
from typing import get_args

from parallel.ledger.flops import FlopConvention
from recipes.checks import check_number


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """How utilization is counted, and where metrics go beside metrics.jsonl.

    Attributes:
        flops: What counts as FLOPs of the model in MFU: `full_attention`, 6 (parameters - lookup table) + 12 layers x
            heads x head_dim x sequence a token; `all_parameters`, the same with the table; or `causal`, attention
            halved.
        peak_tflops: TFLOP/s of one device at the compute dtype, without sparsity. None: known of some GPUs in
            bfloat16; elsewhere MFU is not shown.
        tensorboard: Write to tensorboard/ in the output folder too; needs the extra `tensorboard`.
        wandb_project: Log to this project of Weights & Biases too; needs the extra `wandb`. None: do not.
    """

    flops: FlopConvention = "full_attention"
    peak_tflops: float | None = None
    tensorboard: bool = False
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range.
        """
        if self.flops not in get_args(FlopConvention):
            raise ValueError(f"unknown flops {self.flops!r}; legal: {', '.join(get_args(FlopConvention))}")
        if self.peak_tflops is not None:
            check_number("peak_tflops", self.peak_tflops, above=0)
        if self.wandb_project is not None and not self.wandb_project.strip():
            raise ValueError("wandb_project is empty; name a project, or leave it out")

    def check_installed(self) -> None:
        """Looks for the packages that are asked for, without importing them.

        Raises:
            ValueError: If one is not installed.
        """
        for package, asked in (("tensorboard", self.tensorboard), ("wandb", self.wandb_project is not None)):
            if asked and importlib.util.find_spec(package) is None:
                raise ValueError(
                    f"metrics are to go to {package}, which is not installed; pip install 'meshwright[{package}]', or "
                    "leave the option out"
                )
