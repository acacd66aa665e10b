"""Which rank writes which part of a state, found by each rank alone: what many hold is shared out by bytes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from checkpoint.boxes import Box, intervals
from checkpoint.layout import Axes, Layout

MIN_STRETCH_BYTES = 256 << 10
"""Less than that is not shared out: a thousand counts of steps in a thousand files would take long to read."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A whole tensor.

    Attributes:
        dtype: Type of its values.
        shape: Its global size per dim.
        layout: How the ranks that wrote it held it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that one rank writes.

    Attributes:
        name: The tensor.
        rank: The rank.
        box: The part, never empty.
    """

    name: str
    rank: int
    box: Box

    def key(self, shape: tuple[int, ...]) -> str:
        """Its name in the rank's file: the tensor's, followed by the offsets unless it is the whole."""
        return self.name if self.box.sizes == shape else f"{self.name}@{','.join(map(str, self.box.offsets))}"


class Owners:
    """The parts of all tensors of a checkpoint and who writes them.

    Ranks that hold the same parts of the same tensors lay the bytes of those on one line, in the order of names, and
    cut it into as many equal stretches as they are, or fewer where it is short; a cut between two rows of a tensor
    goes to the nearer one. Each rank finds its stretch by a running sum over its own tensors: nothing is exchanged,
    and the cost on a rank grows with the number of tensors, not with that times the ranks.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Sorts tensors by who holds them.

        Args:
            tensors: Name -> tensor.
        """
        self.tensors = tensors
        self._group_of: dict[str, _Group] = {}
        self._places: dict[tuple[Layout, tuple[int, ...], Box], list[tuple[int, Box]]] = {}
        members: dict[tuple[Axes, frozenset[str], Axes], list[str]] = defaultdict(list)
        for name, tensor in sorted(tensors.items()):
            layout = tensor.layout
            members[layout.mesh, frozenset(axis for axis, _ in layout.splits), layout.at].append(name)
        self._groups = [_Group({name: tensors[name] for name in names}) for names in members.values()]
        for group in self._groups:
            self._group_of |= dict.fromkeys(group.tensors, group)

    def of_rank(self, rank: int) -> list[Piece]:
        """What a rank writes, in the order of its file: wide dtypes first, so that all values are aligned."""
        pieces = []
        for group in self._groups:
            if group.layout.holds(rank):
                replica, coordinates = group.layout.replica(rank), group.coordinates(rank)
                for name, box in group.boxes(coordinates):
                    part = group.stretch(name, box, coordinates, replica)
                    if part is not None:
                        pieces.append(Piece(name, rank, part))
        return sorted(pieces, key=lambda piece: -self.tensors[piece.name].dtype.itemsize)

    def overlapping(self, name: str, box: Box) -> Iterator[Piece]:
        """The pieces that hold the values of a part of a tensor."""
        tensor, group = self.tensors[name], self._group_of[name]
        layout = tensor.layout
        if group.num_replicas > 1:
            for coordinates, held in _held(layout, tensor.shape, box):
                for replica, part in group.stretches(name, held, coordinates, box):
                    yield Piece(name, layout.rank(coordinates, replica), part)
            return
        # What nobody else holds lies alike for all tensors of a shape, and a model has few shapes.
        key = layout, tensor.shape, box
        if key not in self._places:
            found = _held(layout, tensor.shape, box)
            self._places[key] = [(layout.rank(coordinates, 0), held) for coordinates, held in found]
        for rank, held in self._places[key]:
            yield Piece(name, rank, held)


def _held(layout: Layout, shape: tuple[int, ...], box: Box) -> Iterator[tuple[dict[str, int], Box]]:
    """The parts of a tensor that overlap a box, each with the coordinates of the ranks that hold it."""
    along = [
        list(intervals(size, [layout.sizes[axis] for axis in layout.cuts.get(dim, ())], start, start + length))
        for dim, (size, start, length) in enumerate(zip(shape, box.offsets, box.sizes, strict=True))
    ]
    for parts in product(*along):
        coordinates = {
            axis: index
            for dim, (indices, _, _) in enumerate(parts)
            for axis, index in zip(layout.cuts.get(dim, ()), indices, strict=True)
        }
        yield coordinates, Box(tuple(start for _, start, _ in parts), tuple(length for _, _, length in parts))


class _Group:
    """Tensors whose parts the same ranks hold alike."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = tensors
        self.layout = next(iter(tensors.values())).layout
        self.axes = sorted(axis for axis, _ in self.layout.splits)
        self.num_replicas = self.layout.num_replicas
        self._lines: dict[tuple[int, ...], tuple[dict[str, int], int]] = {}

    def coordinates(self, rank: int) -> dict[str, int]:
        return {axis: self.layout.coordinate(rank, axis) for axis in self.axes}

    def boxes(self, coordinates: Mapping[str, int]) -> Iterator[tuple[str, Box]]:
        """What the ranks at some coordinates hold of each tensor, unless that is nothing."""
        for name, tensor in self.tensors.items():
            box = tensor.layout.box(tensor.shape, coordinates)
            if all(box.sizes):
                yield name, box

    def stretch(self, name: str, box: Box, coordinates: Mapping[str, int], replica: int) -> Box | None:
        """The part of a box that one of the ranks which hold it writes; None if that is nothing."""
        if self.num_replicas == 1:
            return box
        cut = self._cuts(name, box, coordinates)
        start, stop = cut.row(replica), cut.row(replica + 1)
        if start == stop:
            return None
        return box.rows(cut.dim, start, stop) if box.sizes else box

    def stretches(self, name: str, box: Box, coordinates: Mapping[str, int], wanted: Box) -> Iterator[tuple[int, Box]]:
        """All those parts that overlap a wanted one, each with the place among the replicas of who writes it."""
        if self.num_replicas == 1:
            yield 0, box
            return
        cut = self._cuts(name, box, coordinates)
        first, last = 0, 1
        if box.sizes:
            first = max(wanted.offsets[cut.dim] - box.offsets[cut.dim], 0)
            last = min(wanted.offsets[cut.dim] + wanted.sizes[cut.dim] - box.offsets[cut.dim], box.sizes[cut.dim])
        replica = max(0, (cut.at + first * cut.row_bytes) * cut.parts // cut.total - 1)
        while cut.row(replica) < last:
            start, stop = cut.row(replica), cut.row(replica + 1)
            if start < stop and stop > first:
                yield replica, box.rows(cut.dim, start, stop) if box.sizes else box
            replica += 1

    def _cuts(self, name: str, box: Box, coordinates: Mapping[str, int]) -> "_Cuts":
        starts, total = self._line(coordinates)
        num_bytes = prod(box.sizes) * self.tensors[name].dtype.itemsize
        dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), 0)
        rows = box.sizes[dim] if box.sizes else 1
        parts = min(self.num_replicas, max(total // MIN_STRETCH_BYTES, 1))
        return _Cuts(starts[name], num_bytes // rows, rows, dim, total, parts)

    def _line(self, coordinates: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Where on the line of some coordinates each tensor starts, and how long the line is."""
        key = tuple(coordinates[axis] for axis in self.axes)
        if key not in self._lines:
            starts, at = {}, 0
            for name, box in self.boxes(coordinates):
                starts[name] = at
                at += prod(box.sizes) * self.tensors[name].dtype.itemsize
            self._lines[key] = starts, at
        return self._lines[key]


@dataclass(frozen=True)
class _Cuts:
    """Where the cuts of a line fall in one tensor's rows."""

    at: int
    row_bytes: int
    num_rows: int
    dim: int
    total: int
    parts: int

    def row(self, part: int) -> int:
        """The row at which a stretch starts; the number of rows for those behind the tensor."""
        cut = part * self.total // self.parts
        return min(max((cut - self.at + self.row_bytes // 2) // self.row_bytes, 0), self.num_rows)
