"""How a tensor is cut over the ranks of a job, in a form that fits on one line of JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from checkpoint.boxes import Box, chunk, whole

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Layout:
    """Which rank holds which part of a tensor.

    Attributes:
        mesh: Name and size of each axis, outermost first; their product is the number of ranks, which lie row-major.
        splits: Axis and tensor dim of each cut, in the order in which they cut; each divides what the ones before it
            left, as `torch.chunk` does. On axes that are neither here nor in `at` all ranks hold the same.
        at: Axis and coordinate, for a tensor that lives on a part of the mesh only.
    """

    mesh: Axes = ()
    splits: Axes = ()
    at: Axes = ()

    @cached_property
    def strides(self) -> dict[str, int]:
        """Axis -> how far apart ranks are that are neighbours along it."""
        strides, stride = {}, 1
        for axis, size in reversed(self.mesh):
            strides[axis] = stride
            stride *= size
        return strides

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis -> ranks along it."""
        return dict(self.mesh)

    @cached_property
    def free(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same."""
        named = {axis for axis, _ in (*self.splits, *self.at)}
        return tuple(axis for axis, _ in self.mesh if axis not in named)

    @cached_property
    def num_replicas(self) -> int:
        """Ranks that hold the same part."""
        return prod(self.sizes[axis] for axis in self.free)

    @cached_property
    def cuts(self) -> dict[int, list[str]]:
        """Tensor dim -> the axes that cut it, in order."""
        cuts: dict[int, list[str]] = {}
        for axis, dim in self.splits:
            cuts.setdefault(dim, []).append(axis)
        return cuts

    def coordinate(self, rank: int, axis: str) -> int:
        """A rank's place along an axis."""
        return rank // self.strides[axis] % self.sizes[axis]

    def holds(self, rank: int) -> bool:
        """Whether a rank is in the part of the mesh on which the tensor lives."""
        return all(self.coordinate(rank, axis) == coordinate for axis, coordinate in self.at)

    def replica(self, rank: int) -> int:
        """A rank's place among those that hold the same part."""
        place = 0
        for axis in self.free:
            place = place * self.sizes[axis] + self.coordinate(rank, axis)
        return place

    def rank(self, coordinates: Mapping[str, int], replica: int) -> int:
        """The rank at some coordinates along the axes that cut, and at a place among those that hold the same."""
        rank = sum(coordinate * self.strides[axis] for axis, coordinate in (*coordinates.items(), *self.at))
        for axis in reversed(self.free):
            replica, coordinate = divmod(replica, self.sizes[axis])
            rank += coordinate * self.strides[axis]
        return rank

    def box(self, shape: Sequence[int], coordinates: Mapping[str, int]) -> Box:
        """The part of a tensor at some coordinates; perhaps empty."""
        return _cut(shape, [(dim, self.sizes[axis], coordinates[axis]) for axis, dim in self.splits])


def replicated(world_size: int) -> Layout:
    """All ranks hold the whole tensor."""
    return Layout(mesh=(("ranks", world_size),))


def stacked(world_size: int) -> Layout:
    """Every rank holds one row."""
    return Layout(mesh=(("ranks", world_size),), splits=(("ranks", 0),))


def local_box(tensor: Tensor) -> Box:
    """The part of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise ValueError(f"this rank holds no part of a tensor on ranks {mesh.mesh.tolist()}")
    cuts = _ordered_cuts(tensor.placements, tuple(mesh.shape))
    return _cut(tensor.shape, [(dim, mesh.size(axis), coordinates[axis]) for axis, dim in cuts])


def layout_of(tensor: Tensor, world_size: int) -> Layout:
    """The layout of a tensor, equal on all ranks that hold parts of it.

    Args:
        tensor: A DTensor, or a plain tensor that all ranks hold alike.
        world_size: Ranks of the job.

    Raises:
        ValueError: If the ranks of its mesh form no regular grid, or it is sharded in a way that is no cut of a dim.
    """
    if not isinstance(tensor, DTensor):
        return replicated(world_size)
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))
    strides = _strides(mesh)
    cuts = _ordered_cuts(tensor.placements, tuple(mesh.shape))
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


def _cut(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Box:
    """The box after cuts of (dim, parts, index)."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, parts, index in cuts:
        start, sizes[dim] = chunk(sizes[dim], parts, index)
        offsets[dim] += start
    return Box(tuple(offsets), tuple(sizes))


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
