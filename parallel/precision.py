"""Which dtype does what in a step."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from parallel.checks import check_choices, check_integer

ComputeDtype = Literal["stored", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the loss is scaled where a model computes in float16.

    Attributes:
        initial: First scale.
        growth: What the scale is multiplied by after a row of steps that did not overflow.
        growth_interval: Steps of such a row.
        backoff: What it is multiplied by after a step that did.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    initial: float = 65536.0
    growth: float = 2.0
    growth_interval: int = 2000
    backoff: float = 0.5

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range.
        """
        check_integer("growth_interval", self.growth_interval, minimum=1)
        if not (1 <= self.initial < float("inf") and 1 <= self.growth < float("inf") and 0 < self.backoff < 1):
            raise ValueError(
                f"loss scaling needs initial >= 1, growth >= 1 and 0 < backoff < 1; got initial={self.initial}, "
                f"growth={self.growth}, backoff={self.backoff}"
            )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which dtype does what; parameters and optimizer state are stored as the model was built (float32).

    Attributes:
        compute: Dtype of matmuls and activations; `stored` leaves it to the parameters. With float16 the loss is
            scaled, and steps whose gradients overflow are skipped.
        reduce: Dtype in which gradients are summed over ranks; `stored` keeps the parameters' own.
        output: Dtype of logits; `stored` leaves them as computed.
        float8: Multiply the linear maps of blocks in float8, with compute bfloat16 on GPUs that have it.
        loss_scaling: How the loss is scaled, with compute float16 only.
    """

    compute: ComputeDtype = "stored"
    reduce: ComputeDtype = "stored"
    output: ComputeDtype = "stored"
    float8: bool = False
    loss_scaling: LossScaling = field(default_factory=LossScaling)

    def __post_init__(self) -> None:
        """Refuses unknown names, and what only float16 gives a meaning.

        Raises:
            ValueError: If a name is not one of the legal ones, or a field has no meaning.
        """
        check_choices(self)
        if self.float8 and self.compute != "bfloat16":
            raise ValueError(
                f"float8=True multiplies what else is computed in bfloat16, but compute is {self.compute!r}; use "
                "compute='bfloat16', or float8=False"
            )
        if self.compute == "float16":
            return
        if self.reduce == "float16":
            raise ValueError(
                f"reduce='float16' needs the loss scale that comes with compute='float16', not {self.compute!r}; use "
                "reduce='float32' or 'bfloat16'"
            )
        if self.loss_scaling != LossScaling():
            raise ValueError(f"{self.loss_scaling} is for compute='float16'; compute is {self.compute!r}")

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of matmuls and activations, None for the stored one."""
        return None if self.compute == "stored" else getattr(torch, self.compute)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Dtype of gradient sums, None for the stored one."""
        return None if self.reduce == "stored" else getattr(torch, self.reduce)

    @property
    def output_dtype(self) -> torch.dtype | None:
        """Dtype of logits, None for the computed one."""
        return None if self.output == "stored" else getattr(torch, self.output)
