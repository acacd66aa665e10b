"""How a tensor is cut over the ranks of a job, in a form that fits on one line of JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from checkpoint.boxes import Box, chunk

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
        return cut(shape, [(dim, self.sizes[axis], coordinates[axis]) for axis, dim in self.splits])


def replicated(world_size: int) -> Layout:
    """All ranks hold the whole tensor."""
    return Layout(mesh=(("ranks", world_size),))


def stacked(world_size: int) -> Layout:
    """Every rank holds one row."""
    return Layout(mesh=(("ranks", world_size),), splits=(("ranks", 0),))


def cut(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Box:
    """The part that is left of a tensor.

    Args:
        shape: Its size per dim.
        cuts: Dim, number of parts and the one that is kept of each cut, the first cut first.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, parts, index in cuts:
        start, sizes[dim] = chunk(sizes[dim], parts, index)
        offsets[dim] += start
    return Box(tuple(offsets), tuple(sizes))
