"""Where the parts of a tensor lie that is cut dim by dim, by integer arithmetic alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A part of a tensor.

    Attributes:
        offsets: Where it starts, per dim.
        sizes: Its size per dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlap(self, other: "Box") -> "Box | None":
        """What two boxes of one tensor share; None if that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + a_size, b + b_size) - start
            for a, a_size, b, b_size, start in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, offsets, strict=True
            )
        )
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: "Box") -> "Box":
        """The same box, counted from the start of an outer one."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def rows(self, dim: int, start: int, stop: int) -> "Box":
        """The part from one row to another along a dim, counted from the start of the box."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, stop - start
        return Box(tuple(offsets), tuple(sizes))


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of one of the parts that `torch.chunk` cuts; the last ones may be shorter or empty."""
    length = -(-size // parts)
    start = min(index * length, size)
    return start, min(length, size - start)


def intervals(size: int, parts: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """The parts of one dim that overlap a range, where each cut divides what the cuts before it left.

    Args:
        size: Size of the dim.
        parts: Into how many parts each cut divides, the first cut first.
        start: First element of the range.
        stop: The element after its last.

    Yields:
        For each part that is not empty: its index in every cut, its start, its length.
    """
    if start >= stop:
        return
    if not parts:
        yield (), 0, size
        return
    length = -(-size // parts[0])
    for index in range(start // length, -(-stop // length)):
        first = index * length
        left = min(length, size - first)
        inner = intervals(left, parts[1:], max(start - first, 0), min(stop - first, left))
        for indices, inner_start, inner_length in inner:
            yield (index, *indices), first + inner_start, inner_length
