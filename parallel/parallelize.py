"""Lays a model out on a mesh; the only place that knows the order in which the axes apply."""

import hashlib

import torch
from torch import nn

from parallel.activation_checkpoint import apply_activation_checkpointing
from parallel.backend import Backend
from parallel.config import ParallelConfig
from parallel.fsdp2 import FullyShard
from parallel.layout import check_built, check_layout, resolve
from parallel.mesh import Mesh
from parallel.none import OneProcess
from parallel.plan import ParallelPlan
from parallel.replaced import mark_replaced
from parallel.replicas import differ_between_ranks, hash_bits
from parallel.tensor_parallel import apply_tensor_parallel, tie
from parallel.trained import Trained

BACKENDS: dict[str, type[Backend]] = {"none": OneProcess, "fsdp2": FullyShard}


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
    check_built(resolved)
    if resolved != mesh.config:
        raise ValueError(f"the mesh was built for {mesh.config}, not for {resolved}; call build_mesh with this config")
    check_layout(resolved, plan.shape)
    plan.check(model)
    _check_values(model, mesh)
    with mark_replaced(model):
        if mesh.degree("tp") > 1:
            # TP first: fully_shard must see DTensors to build the 2-D layout.
            apply_tensor_parallel(
                model,
                mesh["tp"],
                plan.tensor_parallel,
                sequence_parallel=resolved.sequence_parallel,
                loss_parallel=resolved.loss_parallel,
            )
            tie(model, plan.tied)
        apply_activation_checkpointing(
            model,
            plan.blocks,
            resolved.activation_checkpointing,
            every=resolved.activation_checkpoint_every,
            policy=resolved.activation_checkpoint_policy,
        )
        return Trained(model, mesh, resolved, plan, BACKENDS[resolved.data_parallel]())


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
            f"ranks hold different values of {len(apart)} parameters ({', '.join(apart[:3])} ...) and fully_shard "
            "never broadcasts; seed every rank alike before building the model, or build it on meta and materialize it"
        )
