"""Lays a model out on a mesh; the only place that knows the order in which the axes apply."""

import hashlib

import torch
from torch import nn

from parallel.activation_checkpoint import apply_activation_checkpointing
from parallel.async_tensor_parallel import (
    OPTIONS,
    check_async_tensor_parallel,
    enable_async_tensor_parallel,
)
from parallel.backend import Backend
from parallel.block_rules import check_ops, sees_whole_blocks
from parallel.compile import apply_compile, check_compiler, leave_uncompiled
from parallel.compute_dtype import blocks_that_cast
from parallel.config import ParallelConfig
from parallel.context_parallel import apply_context_parallel, check_context_parallel
from parallel.data_parallel import OneProcessManyDevices
from parallel.ddp import Ddp
from parallel.expert_parallel import apply_expert_parallel, check_expert_parallel
from parallel.float8 import apply_float8, check_float8
from parallel.fsdp1 import Fsdp1
from parallel.fsdp2 import FullyShard
from parallel.layout import check_layout, resolve
from parallel.loss_scale import check_loss_scale
from parallel.mesh import Mesh
from parallel.none import OneProcess
from parallel.plan import ParallelPlan
from parallel.replaced import mark_replaced
from parallel.replicas import differ_between_ranks, hash_bits
from parallel.stages import check_cut, check_trainable, cut, keep_part, part_of_plan, untie
from parallel.tensor_parallel import apply_tensor_parallel, check_styles, tie
from parallel.trained import Trained
from parallel.units import choose_units
from parallel.zero1 import Zero1

BACKENDS: dict[str, type[Backend]] = {
    "none": OneProcess,
    "dp": OneProcessManyDevices,
    "ddp": Ddp,
    "zero1": Zero1,
    "fsdp1": Fsdp1,
    "fsdp2": FullyShard,
}


def parallelize(model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> Trained:
    """Splits a model over a mesh.

    Args:
        model: The whole model, on meta (then call `materialize`, or `allocate` and load a checkpoint), or with the same
            real values on every rank; it may be changed in place.
        mesh: What `build_mesh` made of the same config.
        config: The layout.
        plan: What the model declares about itself.

    Returns:
        The object to train.

    Raises:
        ValueError: If the layout does not fit the mesh or the model, the plan does not fit the model, or
            ranks hold different values; raised before anything is changed.
    """
    resolved = resolve(config, mesh.size)
    backend = BACKENDS[resolved.data_parallel]()
    _check(model, mesh, resolved, plan, backend)
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(mesh.device)
    with mark_replaced(model):
        part = _own_part(model, mesh, resolved, plan)
        if mesh.degree("tp") > 1:
            # TP first: fully_shard must see DTensors to build the 2-D layout.
            apply_tensor_parallel(
                model,
                mesh["tp"],
                plan.tensor_parallel,
                sequence_parallel=resolved.sequence_parallel,
                loss_parallel=resolved.loss_parallel,
            )
            tie(model, part.tied)
        if resolved.async_tp:
            enable_async_tensor_parallel(mesh.group("tp"))
        if resolved.cp_method is not None:
            apply_context_parallel(model, mesh["cp"], part, resolved.cp_method)
        if resolved.ep > 1:
            apply_expert_parallel(model, mesh, part)
        _apply_to_blocks(model, resolved, part, backend)
        return Trained(model, mesh, resolved, plan, backend)


def _check(model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan, backend: Backend) -> None:
    """Refuses what does not fit together; what needs other ranks comes last."""
    if config != mesh.config:
        raise ValueError(f"the mesh was built for {mesh.config}, not for {config}; call build_mesh with this config")
    check_layout(config, plan.shape)
    plan.check(model)
    backend.check(mesh, config, plan)
    check_context_parallel(config, plan, mesh.device)
    check_loss_scale(model)
    check_float8(model, plan.blocks, config, mesh.device)
    check_async_tensor_parallel(config, mesh)
    check_expert_parallel(config, plan)
    _check_blocks(model, mesh, config, plan)
    if config.pp > 1:
        check_cut(model, plan)
        check_trainable(model, plan, config)
    if config.tp > 1 and config.sequence_parallel:
        check_styles(model, plan.tensor_parallel)
    _check_values(model, mesh)


def _own_part(model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> ParallelPlan:
    """Drops the stages of other ranks; returns the plan of what is left."""
    if config.pp == 1:
        return plan
    own = [fqn for stage in cut(plan, config) if stage.rank == mesh.coordinate("pp") for fqn in stage.modules]
    keep_part(model, plan, own)
    untie(model, plan.tied)
    return part_of_plan(plan, own)


def _check_blocks(model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> None:
    """Refuses what cannot be done to blocks."""
    if config.compile:
        check_compiler(mesh.device.type)
    check_ops(config, has_experts=any(block.has_experts for block in plan.blocks))
    if not sees_whole_blocks(config, config.activation_checkpointing):
        return
    starts = tuple(f"{block.fqn}." for block in plan.blocks)
    fqns = [fqn for unit in choose_units(model, plan, config.sharding) for fqn in unit.modules]
    within = [fqn for fqn in fqns if fqn.startswith(starts)]
    if within:
        what = "compile=True" if config.compile else "activation_checkpointing='selective'"
        raise ValueError(
            f"{what} sees each block as one sequence of ops, but {len(within)} sharding units lie within blocks "
            f"({', '.join(within[:3])} ...) and gathering them would become part of it; use units='block' or 'model'"
        )


def _apply_to_blocks(model: nn.Module, config: ParallelConfig, plan: ParallelPlan, backend: Backend) -> None:
    """Activation checkpointing, then compile: a policy chooses among the ops of the graph."""
    # Full checkpointing has nothing to choose and goes around the compiled block: within it torch 2.13 fails under tp,
    # where it would have to keep a mesh for backward.
    compile_first = config.activation_checkpointing == "full"
    if config.precision.float8:
        apply_float8(model, plan.blocks)
    options = OPTIONS if config.async_tp else None
    if config.compile:
        leave_uncompiled(model, plan.dispatches)
    if config.compile and compile_first:
        apply_compile(model, plan.blocks, options)
    apart = backend.casts(config) and blocks_that_cast(config, plan)
    apply_activation_checkpointing(
        model,
        plan.blocks,
        config.activation_checkpointing,
        every=config.activation_checkpoint_every,
        policy=config.activation_checkpoint_policy,
        cast=config.precision.compute_dtype if apart else None,
    )
    if config.compile and not compile_first:
        apply_compile(model, plan.blocks, options)


def _check_values(model: nn.Module, mesh: Mesh) -> None:
    """Refuses a model whose ranks were seeded apart: each would contribute shards of another model."""
    if mesh.size == 1:
        return
    named = dict(model.named_parameters())
    kinds = [f"{fqn} {tuple(each.shape)} {each.dtype} meta={each.is_meta}" for fqn, each in named.items()]
    digest = int.from_bytes(hashlib.sha256("; ".join(kinds).encode()).digest()[:7], "big")
    if differ_between_ranks(torch.tensor(digest, device=mesh.device)).item():
        raise ValueError(
            "ranks hold different models: names, shapes, dtypes or which parameters are on meta differ; build the "
            f"same model on every rank. This one has {len(kinds)} parameters, first {kinds[:1]}"
        )
    hashes = [hash_bits(each.detach()).to(mesh.device) for each in named.values() if not each.is_meta]
    if not hashes:
        return
    real = [fqn for fqn, each in named.items() if not each.is_meta]
    differs = differ_between_ranks(torch.stack(hashes)).tolist()
    apart = [fqn for fqn, differ in zip(real, differs, strict=True) if differ]
    if apart:
        raise ValueError(
            f"ranks hold different values of {len(apart)} parameters ({', '.join(apart[:3])} ...), which sharding "
            "never evens out; seed every rank alike before building the model, or build it on meta and materialize it"
        )
