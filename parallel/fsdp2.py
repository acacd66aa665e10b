"""Shards parameters, gradients and optimizer state per parameter through `fully_shard`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from parallel.backend import Backend
from parallel.config import ParallelConfig, ReduceGradients, Sharding
from parallel.local_step import OwnShards, step_on_local_shards
from parallel.mesh import Mesh
from parallel.plan import ParallelPlan, Unit
from parallel.precision import Precision
from parallel.replicas import local_part
from parallel.sharded_forward import gather_in_backward_if_kept, refuse_direct_forward
from parallel.units import choose_units, kept_unit, modules_in_root, with_expert_units


class FullyShard(Backend):
    """The `fsdp2` backend."""

    wraps_before_materialize = True
    # Reducing at once keeps only sharded gradients between micro-batches.
    default_reduce_gradients: ReduceGradients = "every_micro_batch"

    def wrap(self, model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> nn.Module:
        """Shards over the fsdp view, or over dp_replicate x fsdp for the hybrids; no_shard replicates over loss."""
        view = mesh.hybrid if config.is_hybrid else mesh["fsdp"]
        units = choose_units(model, plan, config.sharding)
        expert_mesh = None
        if mesh.experts is not None:
            units = with_expert_units(model, plan, units)
            expert_mesh = mesh.experts[("dp_replicate", "expert_fsdp") if config.is_hybrid else "expert_fsdp"]
        apply_fsdp2(
            model,
            mesh["loss"] if config.resolved_strategy == "no_shard" else view,
            expert_mesh=expert_mesh,
            replicate=config.resolved_strategy == "no_shard",
            units=units,
            # Within a pipeline every micro-batch would gather everything anew.
            reshard_after_forward=config.resolved_strategy in ("full_shard", "hybrid_shard") and config.pp == 1,
            sharding=config.sharding,
            precision=config.precision,
        )
        return model

    def run_micro_batch(self, model: nn.Module, compute: Callable[[], None], *, reduce: bool) -> None:
        """Runs forward and backward of one micro-batch."""
        if isinstance(model, FSDPModule):
            # Every backward counts as the last one: otherwise fully_shard keeps its record of the forward order
            # across micro-batches, and the end of one backward prefetches a unit that nothing needs.
            model.set_requires_gradient_sync(reduce)
        try:
            compute()
        except AssertionError as error:
            if "expects uniform gradient dtype" not in str(error):
                raise
            raise ValueError(
                "a parameter got its first gradient of the step in the last micro-batch, in the compute dtype, where "
                "gradients kept from others have the reduce dtype already; use reduce_gradients='every_micro_batch'"
            ) from error

    def prepare_optimizer(self, optimizer: Optimizer, mesh: Mesh) -> None:
        """Lets the optimizer step on local shards."""
        step_on_local_shards(optimizer, OwnShards())

    def reshard(self, model: nn.Module) -> None:
        """Frees the unsharded parameters of every unit."""
        _reshard(model)


def apply_fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh | None = None,
    replicate: bool = False,
    units: tuple[Unit, ...],
    reshard_after_forward: bool,
    sharding: Sharding,
    precision: Precision,
) -> None:
    """Applies `fully_shard` to each unit, then to the root, which takes the parameters that are left.

    Args:
        model: The whole model, already split by tensor parallelism where that is in use.
        mesh: 1-D to shard, 2-D to replicate over the first dim and shard over the second.
        expert_mesh: The same for units over the view `expert_fsdp`, which expert parallel has.
        replicate: Keep every parameter whole and sum its gradient over a 1-D mesh.
        units: Modules that are gathered together, in the order in which they run.
        reshard_after_forward: Free a unit after its forward and gather it again in backward (ZeRO-3).
        sharding: How units are kept and prefetched.
        precision: Compute and reduce dtypes.

    Raises:
        ValueError: If a unit asks for another view.
    """
    shard = functools.partial(
        _replicate if replicate else fully_shard,
        mp_policy=_precision_policy(precision),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if sharding.cpu_offload
        else OffloadPolicy(),
    )
    shards: dict[str, Callable[..., Any]] = {"fsdp": functools.partial(shard, mesh=mesh)}
    if expert_mesh is not None:
        placement = functools.partial(_expert_placement, expert_mesh.size(-1))
        shards["expert_fsdp"] = functools.partial(shard, mesh=expert_mesh, shard_placement_fn=placement)
    foreign = [unit for unit in units if unit.view not in shards]
    if foreign:
        raise ValueError(f"units can be sharded over {', '.join(shards)} here, not as in {foreign}")
    _shard_units(model, units, shards, reshard_after_forward, sharding)
    refuse_direct_forward(model, type(model).__name__)
    for fqn, module in modules_in_root(model, units).items():
        refuse_direct_forward(module, fqn, instead="the whole model")
    # The root is needed again as soon as backward starts, so by default it stays unsharded until then.
    shards["fsdp"](model)
    model.register_forward_hook(_reshard_after_evaluation)
    _prefetch(model, units, sharding)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Every axis sums (the loss is already divided by the global token count); gloo has no PREMUL_SUM.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(sharding.find_unused_parameters, recurse=False)


def _shard_units(
    model: nn.Module,
    units: Sequence[Unit],
    shards: Mapping[str, Callable[..., Any]],
    after_forward: bool,
    sharding: Sharding,
) -> None:
    """Shards each unit over its view."""
    kept = kept_unit(units, sharding)
    for unit in units:
        modules = [model.get_submodule(fqn) for fqn in unit.modules]
        if not unit.backward_needs_weights:
            gather_in_backward_if_kept(modules)
        for module, fqn in zip(modules, unit.modules, strict=True):
            refuse_direct_forward(module, fqn)
        # Neighbours along fsdp hold different experts, so that groups of them could keep none.
        group = sharding.reshard_group if unit.view == "fsdp" else None
        reshard = False if unit is kept else group or after_forward
        shards[unit.view](
            modules if len(modules) > 1 else modules[0],
            # What backward does without need not wait for it.
            reshard_after_forward=reshard if unit.backward_needs_weights else True,
        )


def _expert_placement(num_ranks: int, parameter: nn.Parameter) -> Shard | None:
    """The dim along which ranks that hold the same experts shard them; None: by expert."""
    rows, columns = local_part(parameter).shape[:2]
    # Fewer experts than ranks would leave ranks without any, which are filled up to send as much as the others.
    return Shard(1) if rows % num_ranks and not columns % num_ranks else None


def _precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=precision.compute_dtype,
        reduce_dtype=precision.reduce_dtype,
        # Casting inputs would also round the rotary tables; activations take the weights' dtype by themselves.
        cast_forward_inputs=False,
    )


def _replicate(
    module: nn.Module | list[nn.Module], *, reshard_after_forward: bool | int = False, **options: Any
) -> Any:
    """`fully_shard` that keeps parameters whole, so that there is nothing to reshard."""
    # Private: torch has no public name yet for fully_shard's replicating twin; test_fsdp2 fails if it moves.
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, **options)


def _prefetch(model: nn.Module, units: Sequence[Unit], sharding: Sharding) -> None:
    """Tells each unit which ones to gather while it computes."""

    def first_module(unit: Unit) -> FSDPModule:
        return model.get_submodule(unit.modules[0])  # type: ignore[return-value]  # fully_shard has made it one

    for index, unit in enumerate(units):
        if sharding.forward_prefetch:
            ahead = units[index + 1 : index + 1 + sharding.forward_prefetch]
            first_module(unit).set_modules_to_forward_prefetch([first_module(each) for each in ahead])
        if sharding.backward_prefetch:
            ahead = units[max(0, index - sharding.backward_prefetch) : index][::-1]
            first_module(unit).set_modules_to_backward_prefetch([first_module(each) for each in ahead])


def _reshard_after_evaluation(model: nn.Module, _inputs: object, _output: object) -> None:
    """Reshards what no backward will reshard: the root, and units that strategies keep gathered for backward.

    Else an optimizer built next would hold dead parameters, and a forward after its step would see the old values.
    """
    if not torch.is_grad_enabled():
        _reshard(model)


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
