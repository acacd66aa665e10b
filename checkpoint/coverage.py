"""Checks that boxes tile a tensor."""

from bisect import bisect_right, insort
from collections.abc import Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, per dim."""


def check_coverage(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Holds boxes against the tensor that they should make up.

    Args:
        name: The tensor's name, for messages.
        shape: Its size per dim.
        boxes: Where each part starts and how large it is; none of them empty.

    Raises:
        ValueError: If a box is empty or leaves the tensor, two overlap, or an element is in none.
    """
    for offsets, sizes in boxes:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            size > 0 and offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{name}: chunk of sizes {list(sizes)} at {list(offsets)} is not within {list(shape)}")
    covered = sum(prod(sizes) for _, sizes in boxes)
    if covered != prod(shape):
        raise ValueError(f"{name}: chunks hold {covered} elements, but shape {list(shape)} has {prod(shape)}")
    # With as many elements as the tensor, boxes leave a hole only where two of them overlap.
    if len(boxes) > 1:
        _check_disjoint(name, shape, boxes)


def _check_disjoint(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Sweeps along the dim that most boxes start on, so that few are open at a time."""
    if not shape:
        raise ValueError(f"{name}: a scalar has {len(boxes)} chunks")
    sweep = max(range(len(shape)), key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    active: list[tuple[int, Box]] = []
    for box in sorted(boxes, key=lambda box: box[0][sweep]):
        start = box[0][sweep]
        del active[: bisect_right(active, start, key=lambda item: item[0])]
        for _, other in active:
            if _overlap(box, other):
                raise ValueError(f"{name}: chunks at {list(other[0])} and {list(box[0])} overlap")
        insort(active, (start + box[1][sweep], box), key=lambda item: item[0])


def _overlap(one: Box, other: Box) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(one[0], one[1], other[0], other[1], strict=True)
    )
