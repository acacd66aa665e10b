"""The global gradient norm and clipping, on any mix of meshes and tensor kinds."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate
from torch.nn.utils import get_total_norm

from parallel.mesh import EXPERT_VIEWS, Mesh

SHARDING_VIEWS = ("fsdp", "tp")
"""Views along which one parameter may be sharded; along the others it is replicated."""


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    mesh: Mesh,
    max_norm: float | None,
    norm_type: float = 2.0,
    views_of: Callable[[Tensor], frozenset[str]] | None = None,
    copies: Sequence[nn.Parameter] = (),
) -> Tensor:
    """Scales all gradients in place so that their global norm is at most `max_norm`.

    Each element counts once, wherever it is sharded or replicated, and every rank gets the same norm.

    Args:
        parameters: Parameters whose gradients to clip.
        mesh: The mesh on whose views they live.
        max_norm: The largest norm allowed; None only measures.
        norm_type: p of the norm, positive or infinity.
        views_of: Tells the views along which a plain parameter is split; None: along none.
        copies: Those of the parameters that another pipeline stage holds too and counts.

    Returns:
        The norm before clipping, a float64 scalar; not finite if any gradient is not.

    Raises:
        ValueError: If max_norm or norm_type is not positive, or a gradient is sharded along another view than these.
    """
    if norm_type <= 0 or (max_norm is not None and not max_norm > 0):
        raise ValueError(f"max_norm={max_norm} and norm_type={norm_type} must be positive")
    parameters, views = list(parameters), views_of or sharded_views
    local = counted = _local_gradients(parameters, views)
    if copies:
        copied = set(map(id, copies))
        counted = _local_gradients([each for each in parameters if id(each) not in copied], views)
    norm = _global_norm(counted, mesh, norm_type)
    if max_norm is not None:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradients in local.values():
            # Private but stable: one launch for all tensors. Public clip_grads_with_norm_ would go through DTensor.
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of the gradients, sharing their memory; sums over ranks that are pending are made.

    Args:
        parameters: Parameters, of which those without a gradient are left out.
    """
    by_views = _local_gradients(parameters, lambda _: frozenset())
    return [gradient for gradients in by_views.values() for gradient in gradients]


def sharded_views(tensor: Tensor) -> frozenset[str]:
    """Names of the views along which a tensor is sharded; empty for a plain tensor.

    Args:
        tensor: A DTensor on a slice of a `Mesh`'s parameter or expert dims, or a plain tensor.
    """
    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    pairs = zip(names, tensor.placements, strict=True)
    sharded = {name for name, placement in pairs if not isinstance(placement, Replicate)}
    # Experts are split over ep and sharded over what it leaves of fsdp, so together over all of it.
    return frozenset("fsdp" if name in EXPERT_VIEWS else name for name in sharded)


def _local_gradients(
    parameters: Iterable[nn.Parameter], views_of: Callable[[Tensor], frozenset[str]]
) -> dict[frozenset[str], list[Tensor]]:
    """Local parts of the gradients, by the views that shard them."""
    local: dict[frozenset[str], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
                parameter.grad = gradient
            local[sharded_views(gradient)].append(gradient.to_local())
        else:
            local[views_of(parameter)].append(gradient)
    return local


def _global_norm(local: dict[frozenset[str], list[Tensor]], mesh: Mesh, norm_type: float) -> Tensor:
    if norm_type <= 2 or norm_type == float("inf"):
        return _norm_in_units(1.0, local, mesh, norm_type)
    # High powers of what is not about 1 would vanish or overflow.
    largest = _norm_in_units(1.0, local, mesh, float("inf"))
    if largest == 0 or not largest.isfinite():
        return largest
    return largest * _norm_in_units(largest.item(), local, mesh, norm_type)


def _norm_in_units(unit: float, local: dict[frozenset[str], list[Tensor]], mesh: Mesh, norm_type: float) -> Tensor:
    """Reduces one scalar for each set of views over those views, then adds the sets up."""
    infinite = norm_type == float("inf")
    # All ranks must agree on the sets, or their collectives would not match; a pipeline stage or a rank with
    # empty shards may lack one, so the sets are fixed rather than found.
    sets = _possible_sets(mesh)
    foreign = [sorted(views) for views in local if views not in sets]
    if foreign:
        raise ValueError(f"gradients are sharded along {foreign}; a norm can be taken over {SHARDING_VIEWS} only")
    totals = torch.zeros(len(sets), dtype=torch.float64, device=mesh.device)
    for index, views in enumerate(sets):
        gradients = [gradient for gradient in local.get(views, []) if gradient.numel()]
        if gradients:
            if unit != 1.0:
                gradients = [gradient / unit for gradient in gradients]
            norm = get_total_norm(gradients, norm_type).to(torch.float64)
            # A maximum over ranks may drop NaN, which must not pass for a finite norm.
            totals[index] = norm.nan_to_num(nan=torch.inf, posinf=torch.inf) if infinite else norm.pow(norm_type)
    for view in SHARDING_VIEWS:
        if mesh.degree(view) == 1:
            continue
        # By number: which of a mask are true a fake tensor does not know, and a dry run takes this step too.
        slots = torch.tensor([index for index, views in enumerate(sets) if view in views], device=mesh.device)
        part = totals[slots]
        dist.all_reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=mesh.group(view))
        totals[slots] = part
    total = totals.max() if infinite else totals.sum()
    if mesh.degree("pp") > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=mesh.group("pp"))
    return total if infinite else total.pow(1.0 / norm_type)


def _possible_sets(mesh: Mesh) -> list[frozenset[str]]:
    sets = [frozenset[str]()]
    for view in SHARDING_VIEWS:
        sets += [views | {view} for views in sets]
    return sets
