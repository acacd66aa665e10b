"""One way to train a model: a layout, what is recomputed, and how a global batch is cut."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from parallel.config import Buckets, ParallelConfig, ReduceGradients, Sharding, Units
from parallel.plan import ModelShape
from parallel.planner.costs import Recompute
from parallel.planner.hardware import Gpu
from parallel.precision import Precision
from parallel.traits import TRAITS

Reduce = Literal["float32", "bfloat16"]
Compute = Literal["bfloat16", "float16", "float8", "stored"]

BUCKET_CAP_MB = Buckets().bucket_cap_mb


class Options(NamedTuple):
    """How a layout groups, gathers and sums what it sends; the defaults are those of a config.

    Attributes:
        units: What is gathered together.
        unit_min_parameters: With units=size, when a module becomes a unit.
        reshard_group: Ranks over which a unit is kept after forward; None: over all.
        prefetch: Units that are gathered ahead, in forward and backward; 0 leaves it to the backend.
        bucket_cap_mb: Size of ddp's buckets, in MiB.
        reduce: Dtype in which gradients are summed over ranks.
    """

    units: Units = "block"
    unit_min_parameters: int = 10_000_000
    reshard_group: int | None = None
    prefetch: int = 0
    bucket_cap_mb: float = BUCKET_CAP_MB
    reduce: Reduce = "float32"

    @property
    def num_changes(self) -> int:
        """Choices that differ from the defaults; the dtype of sums is none of them."""
        return (
            (self.units != "block")
            + (self.reshard_group is not None)
            + (self.prefetch > 0)
            + (self.bucket_cap_mb != BUCKET_CAP_MB)
        )


PLAIN = Options()


@lru_cache
def precision_of(compute: Compute) -> Precision:
    """The precision of a layout, with sums in float32.

    Args:
        compute: As a request says it.
    """
    if compute == "stored":
        return Precision()
    if compute == "float8":
        return Precision(compute="bfloat16", reduce="float32", float8=True)
    return Precision(compute=compute, reduce="float32")


class Candidate(NamedTuple):
    """A layout with what varies within it.

    Attributes:
        config: The layout with every degree resolved, and with what varies at its default.
        recompute: What backward computes again.
        reduce_gradients: When gradients are summed over ranks.
        micro_batch: Sequences of a micro-batch.
        num_micro_batches: Micro-batches of a step on each rank.
        options: How it groups and sends.
    """

    config: ParallelConfig
    recompute: Recompute
    reduce_gradients: ReduceGradients
    micro_batch: int
    num_micro_batches: int
    options: Options = PLAIN

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the dtype of the computation."""
        return 4 if self.config.precision.compute == "stored" else 2

    def layout(self) -> ParallelConfig:
        """The whole layout, checked.

        Raises:
            ValueError: If its fields contradict each other.
        """
        traits, options = TRAITS[self.config.data_parallel], self.options
        varies = traits.shards and self.config.pp == 1 and self.num_micro_batches > 1
        stored = self.config.precision.compute == "stored"
        return replace(
            self.config,
            activation_checkpointing=self.recompute.checkpointing,
            activation_checkpoint_policy=self.recompute.policy,
            reduce_gradients=self.reduce_gradients if varies else None,
            precision=Precision() if stored else replace(self.config.precision, reduce=options.reduce),
            buckets=Buckets(bucket_cap_mb=options.bucket_cap_mb),
            sharding=Sharding(
                units=options.units,
                unit_min_parameters=options.unit_min_parameters,
                reshard_group=options.reshard_group,
                forward_prefetch=options.prefetch,
                backward_prefetch=options.prefetch,
                cpu_offload=self.config.sharding.cpu_offload,
            ),
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
        compile: Whether blocks are compiled, where the layout allows it.
        compute: Dtype of matmuls and activations; `stored` is float32, `float8` multiplies the linear maps of blocks
            in float8 and computes all else in bfloat16.
        reduces: Dtypes in which gradients may be summed over ranks.
        frozen: Share of the parameters that is not trained, as beside adapters: it has no moments and no gradient, so
            none is computed, summed or held.
    """

    shape: ModelShape
    gpu: Gpu
    num_gpus: int
    sequence_length: int
    global_batch: int
    headroom: float = 0.1
    compile: bool = True
    compute: Compute = "bfloat16"
    reduces: tuple[Reduce, ...] = ("float32", "bfloat16")
    frozen: float = 0.0

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range, or the GPU's peak is not known for the dtype.
        """
        for name in ("num_gpus", "sequence_length", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom={self.headroom} must be from 0 to less than 1")
        if not 0 <= self.frozen < 1:
            raise ValueError(f"frozen={self.frozen} must be from 0 to less than 1")
        unknown = [each for each in self.reduces if each not in ("float32", "bfloat16")]
        if unknown or not self.reduces:
            raise ValueError(f"reduces={self.reduces} must be some of float32, bfloat16")
        if self.compute not in get_args(Compute):
            raise ValueError(f"unknown compute {self.compute!r}; legal: {', '.join(get_args(Compute))}")
        self.gpu.peak("float32" if self.compute == "stored" else self.compute)
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
