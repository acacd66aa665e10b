"""Which part of which tensor in Hugging Face files each part of our parameters is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from checkpoint.boxes import Box, whole


class Place(Protocol):
    """A part of a parameter that is, perhaps transposed, a part of a tensor of a file."""

    @property
    def name(self) -> str:
        """The tensor's name in files."""
        ...

    @property
    def expert(self) -> int | None:
        """The part's place along the first dim of our parameter; None: it is the whole parameter."""
        ...

    @property
    def rows(self) -> tuple[int, int] | None:
        """First row along the second dim of the file's tensor and the one after the last; None: all of them."""
        ...

    @property
    def transposed(self) -> bool:
        """Whether the file has the last two dims the other way round."""
        ...


Places = Mapping[str, Sequence[Place]]
"""The places that make up each parameter, by fqn."""


@dataclass(frozen=True)
class Part:
    """A part of a parameter and where files have it.

    Attributes:
        name: The tensor in files.
        box: The part of that tensor.
        values: The same part of a tensor of ours, as the file has its dims.
    """

    name: str
    box: Box
    values: Tensor


def parts_of(places: Sequence[Place], box: Box, values: Tensor) -> Iterator[Part]:
    """Takes a box of a parameter apart into boxes of the tensors of files.

    Args:
        places: The places that make up the parameter.
        box: The part of it that is meant; perhaps empty.
        values: Its values, or the memory for them, of the box's sizes.
    """
    for place in places:
        inner, part = box, values
        if place.expert is not None:
            row = place.expert - box.offsets[0]
            if not 0 <= row < box.sizes[0]:
                continue
            inner, part = Box(box.offsets[1:], box.sizes[1:]), values[row]
        if place.transposed:
            inner, part = Box(_swapped(inner.offsets), _swapped(inner.sizes)), part.mT
        if place.rows is not None:
            inner = Box((inner.offsets[0], inner.offsets[1] + place.rows[0], *inner.offsets[2:]), inner.sizes)
        yield Part(place.name, inner, part)


def file_shapes(places: Places, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that files have to hold.

    Args:
        places: The places of each parameter.
        shapes: Shape of each parameter, by fqn.
    """
    found: dict[str, tuple[int, ...]] = {}
    for fqn, several in places.items():
        for place in several:
            sizes = whole(shapes[fqn] if place.expert is None else shapes[fqn][1:]).sizes
            sizes = _swapped(sizes) if place.transposed else sizes
            if place.rows is not None:
                before = found.get(place.name, (0, 0))
                sizes = (sizes[0], max(before[1], place.rows[1]), *sizes[2:])
            found[place.name] = sizes
    return found


def _swapped(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers[:-2], numbers[-1], numbers[-2])
