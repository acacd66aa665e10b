"""Finds which part of a tensor this rank holds, and how it is cut, from the way torch has placed it."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from checkpoint.boxes import Box, whole
from checkpoint.layout import Axes, Layout, cut, replicated


def local_box(tensor: Tensor) -> Box:
    """The part of the whole tensor that this rank holds."""
    return LocalBoxes().of(tensor)


class LocalBoxes:
    """The parts that this rank holds of many tensors; most share one of a few placements."""

    def __init__(self) -> None:
        """Knows none yet."""
        self._cuts: dict[tuple[int, Sequence[Placement]], list[tuple[int, int, int]]] = {}

    def of(self, tensor: Tensor) -> Box:
        """The part of one of them.

        Raises:
            ValueError: If this rank holds none of it, or it is placed in a way that cannot be saved.
        """
        if not isinstance(tensor, DTensor):
            return whole(tensor.shape)
        mesh, placements = tensor.device_mesh, tensor.placements
        # Tensors keep their meshes, so that no other one gets the number meanwhile.
        cuts = self._cuts.get((id(mesh), placements))
        if cuts is None:
            coordinates = mesh.get_coordinate()
            if coordinates is None:
                raise ValueError(f"this rank holds no part of a tensor on ranks {mesh.mesh.tolist()}")
            ordered = _ordered_cuts(placements, tuple(mesh.shape))
            cuts = [(dim, mesh.size(axis), coordinates[axis]) for axis, dim in ordered]
            self._cuts[id(mesh), placements] = cuts
        return cut(tensor.shape, cuts)


def layout_of(mesh: DeviceMesh | None, placements: Sequence[Placement], world_size: int) -> Layout:
    """The layout of a tensor, equal on all ranks that hold parts of it.

    Args:
        mesh: The mesh of a DTensor; None: a plain tensor that all ranks hold alike.
        placements: Its placement along each dim of the mesh.
        world_size: Ranks of the job.

    Raises:
        ValueError: If the ranks of its mesh form no regular grid, or it is sharded in a way that is no cut of a dim.
    """
    if mesh is None:
        return replicated(world_size)
    names = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))
    strides = _strides(mesh)
    cuts = _ordered_cuts(placements, tuple(mesh.shape))
    axes = sorted(
        (stride, name, size) for name, size, stride in zip(names, mesh.shape, strides, strict=True) if size > 1
    )
    return Layout(
        mesh=_with_gaps(axes, world_size),
        splits=tuple((names[axis], dim) for axis, dim in cuts if mesh.size(axis) > 1),
    )


def part_of_job(layout: Layout, holders: Sequence[int]) -> Layout:
    """The layout of a tensor that only some ranks hold, a pipeline stage's for example.

    Args:
        layout: Its layout if all ranks held it.
        holders: The ranks that hold it, ascending. Where they are several blocks of ranks, the tensor lies on the
            first; the others hold it too.

    Raises:
        ValueError: If they do not make up whole blocks of ranks.
    """
    world_size = prod(size for _, size in layout.mesh)
    if len(holders) == world_size:
        return layout
    first = holders[0]
    run = next((n for n, rank in enumerate(holders) if rank != first + n), len(holders))
    cut = {axis for axis, _ in layout.splits}
    outer, size = layout.mesh[0]
    unit = world_size // size
    blocks = [n for n in range(1, size) if size % n == 0 and n * unit <= run and first % (n * unit) == 0]
    if outer in cut or not blocks:
        raise ValueError(f"a tensor on the ranks {list(holders)} alone does not lie on a block of neighbouring ranks")
    block = blocks[-1]
    inner = ((outer, block),) if block > 1 else ()
    mesh = (("stage", size // block), *inner, *layout.mesh[1:])
    return Layout(mesh=mesh, splits=layout.splits, at=(("stage", first // (block * unit)),))


def _ordered_cuts(placements: Sequence[Placement], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Mesh dim and tensor dim of each cut, the first cut first.

    torch cuts along mesh dims from the left, but where fully_shard divides what tensor parallelism left of a dim, its
    placement tells into how many parts that dim was cut before.
    """
    by_dim: dict[int, list[int]] = {}
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ValueError(f"a tensor that is {placement} cannot be saved; reduce it first")
        order = by_dim.setdefault(dim, [])
        earlier = getattr(placement, "split_factor", 1)
        position = next((n for n in range(len(order) + 1) if prod(sizes[each] for each in order[:n]) == earlier), None)
        if position is None:
            raise ValueError(
                f"a tensor that is placed as {list(placements)} on a mesh of {list(sizes)} cannot be saved"
            )
        order.insert(position, axis)
    return [(axis, dim) for dim, order in by_dim.items() for axis in order]


def _strides(mesh: DeviceMesh) -> list[int]:
    """How far apart neighbouring ranks are along each dim of a mesh."""
    ranks = mesh.mesh.cpu()
    strides = [
        int(ranks.select(dim, 1).flatten()[0] - ranks.flatten()[0]) if ranks.size(dim) > 1 else 1
        for dim in range(ranks.ndim)
    ]
    grid = ranks.flatten()[0].clone()
    for dim, stride in enumerate(strides):
        steps = torch.arange(ranks.size(dim)) * stride
        grid = grid + steps.view([-1 if each == dim else 1 for each in range(ranks.ndim)])
    first = int(ranks.flatten()[0])
    aligned = all(
        stride > 0 and first // stride % size == 0
        for stride, size in zip(strides, ranks.shape, strict=True)
        if size > 1
    )
    if not aligned or not torch.equal(grid, ranks):
        raise ValueError(f"the ranks {ranks.tolist()} of a mesh form no regular grid; what they hold cannot be saved")
    return strides


def _with_gaps(axes: Sequence[tuple[int, str, int]], world_size: int) -> Axes:
    """A mesh of the whole job out of (stride, name, size) of some axes, ascending."""
    mesh: list[tuple[str, int]] = []
    stride = 1

    def fill(upto: int) -> None:
        if upto % stride:
            raise ValueError(f"a mesh with the axes {list(axes)} does not fit {world_size} ranks")
        if upto > stride:
            name = next(name for n in range(len(axes) + 2) if (name := f"ranks{n or ''}") not in dict(mesh))
            mesh.append((name, upto // stride))

    for axis_stride, name, size in axes:
        fill(axis_stride)
        mesh.append((name, size))
        stride = axis_stride * size
    fill(world_size)
    return tuple(reversed(mesh))
