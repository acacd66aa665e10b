"""Verifies that ranks which should hold the same values do."""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.gradients import sharded_views
from parallel.mesh import PARAMETER_VIEWS, Mesh

CHUNK_ELEMENTS = 1 << 22


def verify_replicas(
    parameters: Mapping[str, nn.Parameter],
    mesh: Mesh,
    views_of: Callable[[Tensor], frozenset[str]] = sharded_views,
) -> None:
    """Compares a hash of each parameter along every axis on which it is replicated.

    `fully_shard` never broadcasts, so replicas that start apart stay apart without an error.

    Args:
        parameters: Parameters by fqn, the same names on every rank of a pipeline stage.
        mesh: The mesh on whose views they live.
        views_of: Tells the views along which a parameter is split.

    Raises:
        ValueError: On every rank, if replicas differ anywhere; names those of this rank's pipeline stage.
    """
    views = [view for view in PARAMETER_VIEWS[1:] if mesh.degree(view) > 1]
    hashes = torch.zeros(len(parameters), dtype=torch.int64, device=mesh.device)
    differs = torch.zeros(len(views), len(parameters), dtype=torch.int64, device=mesh.device)
    for index, parameter in enumerate(parameters.values()):
        hashes[index] = hash_bits(local_part(parameter))
    for along, view in zip(differs, views, strict=True):
        apart = differ_between_ranks(hashes, mesh.group(view))
        replicated = [view not in views_of(parameter) for parameter in parameters.values()]
        along.copy_(apart & torch.tensor(replicated, device=mesh.device))
    for view in views:
        # Ranks that hold another shard saw no difference themselves.
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=mesh.group(view))
    anywhere = differs.any().to(torch.int64)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    if anywhere.item():
        names = list(parameters)
        seen = "; ".join(
            f"along {view}: {', '.join(names[index] for index in along.nonzero().flatten().tolist()[:5])}"
            for view, along in zip(views, differs, strict=True)
            if along.any()
        )
        raise ValueError(
            f"replicas of parameters differ ({seen or 'in another pipeline stage'}); give every rank the same values: "
            "build the model on meta and call materialize, or load a checkpoint"
        )


def differ_between_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Which elements are not the same on all ranks of a group; the answer is the same on each.

    Args:
        values: An int64 tensor of the same shape on every rank.
        group: The ranks to compare; None: all.

    Returns:
        A bool tensor of that shape.
    """
    # The largest complement is the complement of the smallest, so one reduction finds both ends.
    ends = torch.stack([values, ~values])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    return ends[0] != ~ends[1]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory, cut off from autograd."""
    return local_parts([tensor])[0]


@torch.no_grad()
def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same of many, in less time than one by one."""
    # Without gradients to_local only hands out the part; detaching a DTensor would cost a dispatch.
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]


def own_part(tensor: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, as a view: the one that a tensor of the same shape is laid out to have.

    Args:
        tensor: A DTensor, or a plain tensor, whose part is all of it.
        whole: Values of the whole shape.
    """
    if not isinstance(tensor, DTensor):
        return whole
    # Where the part lies, as checkpoints ask for it; distribute_tensor would copy it once more.
    (part,) = tensor.__create_chunk_list__()
    return whole[tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes, strict=True))]


def hash_bits(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits, an int64 scalar on its device; equal tensors hash equal.

    A weighted sum modulo 2^64 with odd weights, so that a change of one element always shows.

    Args:
        tensor: Any plain tensor.
    """
    # Wide elements as two words each: signs of float64 are worth 2^63, so that two changed ones would cancel.
    words = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    flat = tensor.contiguous().view(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        chunk = flat[start : start + CHUNK_ELEMENTS].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), device=tensor.device).mul_(2).add_(1)
        total = total + (chunk * weights.mul_(0x5851F42D4C957F2D)).sum()
    return total
