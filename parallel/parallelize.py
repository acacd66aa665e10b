"""Lays a model out on a mesh; the only place that knows the order in which the axes apply."""

import torch
import torch.distributed as dist
from torch import nn

from parallel.backend import Backend
from parallel.config import ParallelConfig
from parallel.fsdp2 import FullyShard
from parallel.layout import check_built, check_layout, resolve
from parallel.mesh import Mesh
from parallel.none import OneProcess
from parallel.plan import ParallelPlan
from parallel.replicas import hash_bits
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
    return Trained(model, mesh, resolved, plan, BACKENDS[resolved.data_parallel]())


def _check_values(model: nn.Module, mesh: Mesh) -> None:
    """Refuses a model whose ranks were seeded apart: each would contribute shards of another model."""
    real = {fqn: parameter for fqn, parameter in model.named_parameters() if not parameter.is_meta}
    if not real or mesh.size == 1:
        return
    hashes = torch.stack([hash_bits(parameter.detach()) for parameter in real.values()]).to(mesh.device)
    least, most = hashes.clone(), hashes.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    apart = [fqn for fqn, differs in zip(real, (least != most).tolist(), strict=True) if differs]
    if apart:
        raise ValueError(
            f"ranks hold different values of {len(apart)} parameters ({', '.join(apart[:3])} ...) and fully_shard "
            "never broadcasts; seed every rank alike before building the model, or build it on meta and materialize it"
        )
