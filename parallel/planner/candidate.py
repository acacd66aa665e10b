"""One way to train a model: a layout, what is recomputed, and how a global batch is cut."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from parallel.config import ParallelConfig, ReduceGradients
from parallel.plan import ModelShape
from parallel.planner.costs import Recompute
from parallel.planner.hardware import Gpu
from parallel.precision import Precision
from parallel.traits import TRAITS


class Candidate(NamedTuple):
    """A layout with what varies within it.

    Attributes:
        config: The layout with every degree resolved, and with no activation checkpointing of its own.
        recompute: What backward computes again.
        reduce_gradients: When gradients are summed over ranks.
        micro_batch: Sequences of a micro-batch.
        num_micro_batches: Micro-batches of a step on each rank.
    """

    config: ParallelConfig
    recompute: Recompute
    reduce_gradients: ReduceGradients
    micro_batch: int
    num_micro_batches: int

    def layout(self) -> ParallelConfig:
        """The whole layout, checked.

        Raises:
            ValueError: If its fields contradict each other.
        """
        varies = TRAITS[self.config.data_parallel].shards and self.config.pp == 1 and self.num_micro_batches > 1
        return replace(
            self.config,
            activation_checkpointing=self.recompute.checkpointing,
            activation_checkpoint_policy=self.recompute.policy,
            reduce_gradients=self.reduce_gradients if varies else None,
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be trained on what.

    Attributes:
        shape: Counts and widths of the model.
        gpu: The kind of GPU.
        num_gpus: How many.
        sequence_length: Tokens of a sequence.
        global_batch: Sequences of a step, over all ranks.
        headroom: Share of a GPU's memory that is left free, for what no model of memory sees: the driver's context,
            buffers of the network library, and the error of the prediction.
        compile: Whether blocks are compiled, where the schedule allows it.
        reduce: Dtype in which gradients are summed over ranks.
    """

    shape: ModelShape
    gpu: Gpu
    num_gpus: int
    sequence_length: int
    global_batch: int
    headroom: float = 0.1
    compile: bool = True
    reduce: str = "float32"

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range.
        """
        for name in ("num_gpus", "sequence_length", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom={self.headroom} must be from 0 to less than 1")
        if self.reduce not in ("float32", "bfloat16"):
            raise ValueError(f"unknown reduce {self.reduce!r}; legal: float32, bfloat16")
        longest = self.shape.max_sequence_length
        if longest is not None and self.sequence_length > longest:
            raise ValueError(
                f"sequence_length={self.sequence_length} is more than the model's max_sequence_length={longest}; "
                "shorten it"
            )

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU less the headroom."""
        return self.gpu.memory_bytes * (1 - self.headroom)
