"""Shards parameters in flattened units through torch's first generation, `FullyShardedDataParallel`."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.backend import Backend, OptimizerFactory
from parallel.config import ParallelConfig, ReduceGradients
from parallel.flat_layout import FlatLayout
from parallel.flat_ranges import FlatRanges
from parallel.flat_unit import FlatUnit, wrap_units
from parallel.local_step import OwnShards, step_on_local_shards
from parallel.mesh import Mesh
from parallel.plan import ParallelPlan
from parallel.units import choose_units


class Fsdp1(Backend):
    """The `fsdp1` backend.

    A unit's parameters are concatenated, padded, and cut into ranges of as many elements on each rank, whatever their
    shapes. The model keeps its own parameters (`use_orig_params`), now 1-D views of the range, so that optimizer groups
    and frozen parameters are told apart within a unit, which one parameter for the whole unit would forbid.

    A rank holds the whole model until it is wrapped. A unit of several modules is left to the root, which is gathered
    first and kept until its backward, since this generation gathers for one module at a time. Gradients that wait for
    the last micro-batch add up in the compute dtype.
    """

    wraps_before_materialize = False
    # Reducing at once keeps only sharded gradients between micro-batches.
    default_reduce_gradients: ReduceGradients = "every_micro_batch"
    holds_canonical = False

    def __init__(self) -> None:
        """Knows no model yet."""
        self._units: list[FlatUnit] = []
        self._whole_and_frozen: list[FlatUnit] = []
        self._held: dict[str, FlatLayout] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._views: dict[Tensor, frozenset[str]] = {}

    def check(self, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> None:
        """Refuses offloading on the CPU, and what FSDP1 gets wrong without an error."""
        if config.sharding.cpu_offload and mesh.device.type == "cpu":
            raise ValueError(
                "fsdp1 with sharding.cpu_offload=True keeps parameters in host memory beside a GPU, but this mesh is "
                "on the CPU, where they are in host memory anyway; leave it out, or use data_parallel='fsdp2'"
            )
        if config.tp > 1 and mesh.degree("fsdp") == 1:
            raise ValueError(
                f"fsdp1 with tp={config.tp} needs dp_shard > 1: where it keeps parameters whole (dp_shard="
                f"{config.dp_shard}, strategy={config.resolved_strategy!r}) it makes those that tp splits anew in each "
                "step, and an optimizer would update nothing; use data_parallel='fsdp2'"
            )
        if config.reduce_gradients == "every_micro_batch" and _sums_once(mesh, config):
            raise ValueError(
                "fsdp1 can sum gradients over ranks only once a step where it holds them whole (dp_shard="
                f"{config.dp_shard}), as it would sum again what it has summed before, or offloads them (cpu_offload="
                f"{config.sharding.cpu_offload}), as it would forget them; use reduce_gradients='last', or leave it out"
            )
        if config.tp > 1 and (config.reduce_gradients == "last" or config.sharding.cpu_offload):
            raise ValueError(
                f"fsdp1 with tp={config.tp} has no place for whole gradients that wait for the last micro-batch, as "
                f"with reduce_gradients={config.reduce_gradients!r} or cpu_offload={config.sharding.cpu_offload}; "
                "leave both out, or use data_parallel='fsdp2'"
            )
        if config.tp > 1 and plan.tied:
            raise ValueError(f"fsdp1 with tp={config.tp} would untie {plan.tied}; use data_parallel='fsdp2', or tp=1")

    def wrap(self, model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> nn.Module:
        """Flattens and shards each unit over the fsdp view, or over dp_replicate x fsdp for the hybrids."""
        self._mesh, view, strategy = mesh, mesh["fsdp"], config.resolved_strategy
        if mesh.degree("fsdp") == 1:
            # Also a hybrid: FSDP1 would take its groups of one rank for all there is, and never sum over replicas.
            view, strategy = mesh["dp_replicate"], "no_shard"
        elif config.is_hybrid:
            # FSDP1's own groups follow the number of GPUs of a node, which is none on CPUs: replicas would drift apart.
            view = mesh.hybrid
        if _sums_once(mesh, config):
            self.default_reduce_gradients = "last"
        trainable = {fqn: parameter.requires_grad for fqn, parameter in model.named_parameters()}
        held = {fqn: FlatLayout.before(parameter) for fqn, parameter in model.named_parameters()}
        self._units = wrap_units(
            model,
            view,
            mesh.device,
            strategy=strategy,
            units=choose_units(model, plan, config.sharding),
            sharding=config.sharding,
            precision=config.precision,
        )
        self._parameters = dict(model.named_parameters())
        for fqn, parameter in self._parameters.items():
            # FSDP1 makes every parameter that tensor parallelism has split trainable.
            parameter.requires_grad_(trainable[fqn])
        self._held = held if strategy == "no_shard" else self._with_ranges(held)
        self._whole_and_frozen = [
            unit
            for unit in self._units
            if strategy == "no_shard" and unit.fqns and not any(trainable[fqn] for fqn in unit.fqns)
        ]
        self._views = {self._parameters[fqn]: each.views for fqn, each in self._held.items()}
        root = self._units[-1]
        root.register_forward_hook(self._reshard_after_evaluation)
        return root

    def run_micro_batch(self, model: nn.Module, compute: Callable[[], None], *, reduce: bool) -> None:
        """Runs forward and backward of one micro-batch, both within `no_sync` where nothing is sent."""
        with nullcontext() if reduce else self._units[-1].no_sync():
            compute()
        for unit in self._whole_and_frozen:
            unit.show_parameters()
        if reduce:
            self._complete_gradients()

    def build_optimizer(self, factory: OptimizerFactory, trainable: dict[str, nn.Parameter]) -> Optimizer:
        """Shows the factory parameters of the model's shapes, by which it may sort them into groups."""
        shown = {fqn: self._stand_in(fqn, parameter) for fqn, parameter in trainable.items()}
        optimizer = factory(shown)
        if optimizer.state and any(shown[fqn] is not trainable[fqn] for fqn in trainable):
            raise ValueError(
                f"{type(optimizer).__name__} makes its state when it is built, when it cannot know which part of each "
                "parameter a rank holds under fsdp1; use another optimizer, or data_parallel='fsdp2'"
            )
        held = {id(stand_in): trainable[fqn] for fqn, stand_in in shown.items()}
        for group in optimizer.param_groups:
            group["params"][:] = [held.get(id(parameter), parameter) for parameter in group["params"]]
        return optimizer

    def prepare_optimizer(self, optimizer: Optimizer, mesh: Mesh) -> None:
        """Refuses optimizers that look at whole matrices where a rank holds parts of them."""
        if any(held.views for held in self._held.values()):
            step_on_local_shards(optimizer, OwnShards())

    def reshard(self, model: nn.Module) -> None:
        """Frees the gathered parameters of every unit."""
        for unit in self._units:
            unit.reshard()

    def gathered(self) -> Iterable[Tensor]:
        """What each unit has gathered."""
        return (tensor for unit in self._units for tensor in unit.gathered())

    def sharded_views(self, parameter: Tensor) -> frozenset[str]:
        """Where a parameter is split, which its type does not tell."""
        return self._views[parameter]

    def whole_shape(self, fqn: str, parameter: Tensor) -> torch.Size:
        """Shape of a whole parameter."""
        return self._held[fqn].shape if self._held else parameter.shape

    def to_canonical(self, fqn: str, held: Tensor) -> Tensor:
        """A DTensor split by rows, in memory of its own, but under no_shard the parameter itself."""
        return self._held[fqn].to_rows(held, self._mesh)

    def from_canonical(self, fqn: str, canonical: Tensor, held: Tensor) -> None:
        """Fills this rank's range from its rows and those of others."""
        self._held[fqn].fill(held, canonical, self._mesh)

    def _with_ranges(self, held: dict[str, FlatLayout]) -> dict[str, FlatLayout]:
        """Ranges lie in the order of ranks."""
        bounds = {fqn: own for unit in self._units for fqn, own in unit.bounds(self._mesh.degree("fsdp")).items()}
        return {
            fqn: replace(each, ranges=FlatRanges(each.part_shape, bounds[fqn]), views=each.views | frozenset({"fsdp"}))
            for fqn, each in held.items()
        }

    def _complete_gradients(self) -> None:
        """Gives parameters of which this rank holds nothing an empty gradient.

        FSDP1 leaves them without, so an optimizer would keep state for a parameter on some ranks only.
        """
        for unit in self._units:
            for fqn in unit.fqns if unit.has_gradient else ():
                parameter = self._parameters[fqn]
                if parameter.requires_grad and parameter.grad is None and not parameter.numel():
                    parameter.grad = torch.empty_like(parameter)

    def _stand_in(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter, or one of the whole shape that takes no memory."""
        shape = self.whole_shape(fqn, parameter)
        if parameter.shape == shape:
            return parameter
        return nn.Parameter(torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(shape))

    def _reshard_after_evaluation(self, model: nn.Module, _inputs: object, _output: object) -> None:
        """Frees what no backward will free; the next forward would use those values though a step has changed them."""
        if not torch.is_grad_enabled():
            self.reshard(model)


def _sums_once(mesh: Mesh, config: ParallelConfig) -> bool:
    """Whether gradients that have been summed over ranks must not meet those of another micro-batch."""
    holds_whole = mesh.degree("fsdp") == 1 and mesh.degree("dp_replicate") > 1
    return holds_whole or config.sharding.cpu_offload
