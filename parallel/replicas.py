"""Verifies that ranks which should hold the same values do."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.gradients import sharded_views
from parallel.mesh import PARAMETER_VIEWS, Mesh

CHUNK_ELEMENTS = 1 << 22


def verify_replicas(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
    """Compares a hash of each parameter along every axis on which it is replicated.

    `fully_shard` never broadcasts, so replicas that start apart stay apart without an error.

    Args:
        parameters: Parameters by fqn, the same names on every rank of a pipeline stage.
        mesh: The mesh on whose views they live.

    Raises:
        ValueError: On every rank, if replicas differ anywhere; names the parameters that this rank saw differ.
    """
    hashes = {fqn: hash_bits(local_part(parameter)).to(mesh.device) for fqn, parameter in parameters.items()}
    differing: dict[str, list[str]] = {}
    for view in PARAMETER_VIEWS[1:]:
        if mesh.degree(view) == 1:
            continue
        names = [fqn for fqn, parameter in parameters.items() if view not in sharded_views(parameter)]
        if not names:
            continue
        mine = torch.stack([hashes[fqn] for fqn in names])
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.group(view))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.group(view))
        apart = [fqn for fqn, differs in zip(names, (least != most).tolist(), strict=True) if differs]
        if apart:
            differing[view] = apart
    anywhere = torch.tensor(int(bool(differing)), device=mesh.device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    if anywhere.item():
        seen = "; ".join(f"along {view}: {', '.join(names[:5])}" for view, names in differing.items())
        raise ValueError(
            f"replicas of parameters differ ({seen or 'seen by other ranks'}); give every rank the same values: build "
            "the model on meta and call materialize, or load a checkpoint"
        )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def hash_bits(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits, an int64 scalar on its device; equal tensors hash equal.

    A weighted sum modulo 2^64 with odd weights, so that a change of one element always shows.

    Args:
        tensor: Any plain tensor.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.contiguous().view(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        chunk = flat[start : start + CHUNK_ELEMENTS].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), device=tensor.device).mul_(2).add_(1)
        total = total + (chunk * weights.mul_(0x5851F42D4C957F2D)).sum()
    return total
