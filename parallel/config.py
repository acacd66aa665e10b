"""How a model is split over ranks: one degree per mesh axis beside the policies that go with it."""

from dataclasses import dataclass, field
from typing import Literal

from parallel.checks import check_choices, check_integer
from parallel.contradictions import check_axes, check_backend, check_strategy
from parallel.precision import Precision
from parallel.traits import TRAITS

DataParallel = Literal["none", "dp", "ddp", "zero1", "fsdp1", "fsdp2"]
Strategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard"]
Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v", "csv"
]
ContextParallelMethod = Literal["allgather", "ring", "ulysses"]
ActivationCheckpointing = Literal["none", "full", "selective"]
ReduceGradients = Literal["every_micro_batch", "last"]
Units = Literal["block", "size", "model"]

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How parameters are grouped, gathered and kept by a backend that shards them.

    Attributes:
        units: What is gathered together: each block as the model's plan says, modules by size, or the whole model.
            A plan whose units come from `units_where` follows any predicate.
        unit_min_parameters: With units=size, a module becomes a unit once it holds so many parameters.
        reshard_group: After forward keep a unit sharded over this many neighbouring ranks instead of all, so that
            backward gathers it within a node; with full_shard and hybrid_shard only. None: over all. Experts that ep
            splits stay sharded over all ranks that hold them.
        keep_last_unit: Leave the last unit that backward needs gathered after forward, as it is needed at once.
        forward_prefetch: How many units ahead of its use a unit is gathered in forward; 0 leaves it to the backend.
        backward_prefetch: The same in backward.
        limit_all_gathers: Let the host run ahead by two gathered units at most, which bounds memory on GPUs; with fsdp1
            only.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory.
        find_unused_parameters: Sum gradients of zeros for parameters that a rank's loss does not use, needed where
            others use them; with fsdp2 only, as fsdp1 always does.
    """

    units: Units = "block"
    unit_min_parameters: int = 10_000_000
    reshard_group: int | None = None
    keep_last_unit: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    limit_all_gathers: bool = True
    cpu_offload: bool = False
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a name is unknown or a number out of its range.
        """
        check_choices(self)
        for name, minimum in (("unit_min_parameters", 1), ("forward_prefetch", 0), ("backward_prefetch", 0)):
            check_integer(name, getattr(self, name), minimum=minimum)
        if self.reshard_group is not None:
            check_integer("reshard_group", self.reshard_group, minimum=2)
        if self.units != "size" and self.unit_min_parameters != type(self).unit_min_parameters:
            raise ValueError(
                f"unit_min_parameters={self.unit_min_parameters} needs units='size'; units is {self.units!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """How ddp and zero1 send gradients while backward runs.

    Attributes:
        bucket_cap_mb: Size of the buckets in which gradients are sent, in MiB; smaller ones start earlier.
        find_unused_parameters: Look in every forward for parameters that get no gradient; needed only where a model
            does not use all of them in every step.
        static_graph: Promise that each micro-batch uses the same parameters, perhaps not all, which DDP then need not
            look for.
    """

    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    static_graph: bool = False

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If the size is not positive.
        """
        check_choices(self)
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={self.bucket_cap_mb} must be positive")
        if self.find_unused_parameters and self.static_graph:
            raise ValueError(
                "find_unused_parameters=True says that the parameters in use change, static_graph=True that they do "
                "not; set one (static_graph notices by itself what is never used)"
            )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """One degree per mesh axis, how data parallelism shards, and the policies that go with it.

    Attributes:
        pp: Pipeline stages.
        dp_replicate: Replicas of the (sharded) model.
        dp_shard: Ranks that share one copy of parameters, gradients and optimizer state; -1 takes the ranks
            that the other axes leave.
        cp: Ranks that share one sequence.
        tp: Ranks that share each matrix.
        ep: Ranks that share the experts; carved out of dp_shard x cp.
        data_parallel: Backend of the data-parallel axes.
        strategy: What the backend shards: full_shard (ZeRO-3), shard_grad_op (ZeRO-2), the hybrids of both over
            dp_replicate, no_shard. None: full_shard for fsdp1 and fsdp2, nothing to choose for the others.
        sequence_parallel: Split activations between the tensor-parallel parts along the sequence.
        loss_parallel: Keep logits split along the vocabulary in the loss; False gathers them.
        schedule: Pipeline schedule, with pp > 1 only; csv reads it from a file.
        schedule_file: With schedule=csv, a table with a row for each rank of what it does in order: `0F0` (stage 0
            goes forward with micro-batch 0), `0B0` (backward), or `0I0` and `0W0` (its halves: inputs, weights).
        stages: Blocks of each pipeline stage, in order; with interleaved schedules several times pp of them. None: as
            few stages as the schedule takes, balanced by cost.
        cp_method: How attention sees the whole sequence, with cp > 1 only.
        precision: Compute and reduce dtypes.
        activation_checkpointing: What backward computes again instead of keeping it: nothing, all of a block but its
            input, or what a policy does not keep. Where a schedule computes gradients of weights apart, `full` computes
            a block again for each of its weights, which takes several times as long and may hold more than `none`.
        activation_checkpoint_every: Do so in the first block and in every n-th after it.
        activation_checkpoint_policy: With `selective`, which results of ops are kept: `every_second_matmul`,
            `matmuls`, `attention`, or a name that was added to `activation_checkpoint.POLICIES`.
        compile: Compile each block, through inductor. The first step then takes some ten seconds longer.
        async_tp: Overlap the collectives of tp with matmuls, in compiled blocks on GPUs that read each other's memory.
        sharding: How parameters are grouped, gathered and kept; with fsdp1 and fsdp2 only.
        buckets: How gradients are sent; with ddp and zero1 only.
        reduce_gradients: When ranks sum gradients: after every micro-batch, or after the last, which sends less
            but holds unsharded gradients meanwhile. None: the backend's default.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    data_parallel: DataParallel = "fsdp2"
    strategy: Strategy | None = None
    sequence_parallel: bool = True
    loss_parallel: bool = True
    schedule: Schedule | None = None
    schedule_file: str | None = None
    stages: tuple[int, ...] | None = None
    cp_method: ContextParallelMethod | None = None
    precision: Precision = field(default_factory=Precision)
    activation_checkpointing: ActivationCheckpointing = "none"
    activation_checkpoint_every: int = 1
    activation_checkpoint_policy: str = "every_second_matmul"
    compile: bool = False
    async_tp: bool = False
    sharding: Sharding = field(default_factory=Sharding)
    buckets: Buckets = field(default_factory=Buckets)
    reduce_gradients: ReduceGradients | None = None

    def __post_init__(self) -> None:
        """Checks all that needs neither a world size nor a model.

        Raises:
            ValueError: If a name is unknown, a degree is illegal, or two fields contradict each other.
        """
        check_choices(self)
        for name in DEGREES:
            degree = getattr(self, name)
            if type(degree) is not int or degree != -1:
                check_integer(name, degree, minimum=1)
            elif name != "dp_shard":
                raise ValueError(f"{name}=-1 must be at least 1; only dp_shard may be -1 (the ranks that are left)")
        check_integer("activation_checkpoint_every", self.activation_checkpoint_every, minimum=1)
        self._check_recomputation()
        check_axes(self)
        check_backend(self)
        check_strategy(self)

    def _check_recomputation(self) -> None:
        """Refuses fields of activation checkpointing that the way which was chosen does not read."""
        if self.activation_checkpoint_every > 1 and self.activation_checkpointing == "none":
            raise ValueError(
                f"activation_checkpoint_every={self.activation_checkpoint_every} needs activation_checkpointing 'full' "
                "or 'selective'; it is 'none'"
            )
        policy, default = self.activation_checkpoint_policy, type(self).activation_checkpoint_policy
        if policy != default and self.activation_checkpointing != "selective":
            raise ValueError(
                f"activation_checkpoint_policy={policy!r} needs activation_checkpointing 'selective'; it is "
                f"{self.activation_checkpointing!r}"
            )

    @property
    def resolved_strategy(self) -> Strategy:
        """The strategy in force: `strategy`, or the backend's own where that is None."""
        return self.strategy or ("full_shard" if TRAITS[self.data_parallel].shards else "no_shard")

    @property
    def is_hybrid(self) -> bool:
        """Whether parameters are sharded over fsdp and replicated over dp_replicate."""
        return self.resolved_strategy in ("hybrid_shard", "hybrid_shard_zero2")
