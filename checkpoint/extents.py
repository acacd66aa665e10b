"""Cuts what is wanted of a file into reads that move few bytes in few calls."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from checkpoint.boxes import Box
from checkpoint.safetensors_header import StoredValues
from checkpoint.shard_file import memory_of

READ_BYTES = 4 << 20
"""Bytes of one read at most, also of memory that a read takes beside its target."""
MAX_TRANSFERS = 400
"""Places that one read fills at most."""


@dataclass(frozen=True)
class Part:
    """Values of a file that begin at a byte, and the memory that takes them.

    `strides` says how many values apart in the file are neighbours along each dim.
    """

    start: int
    out: Tensor
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """From the first value to the last, with all that lies in between."""
        steps = sum((size - 1) * stride for size, stride in zip(self.out.shape, self.strides, strict=True))
        return (1 + steps) * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the file can go straight to where they belong."""
        out = self.out
        same = out.dtype == self.dtype and out.device.type == "cpu" and out.is_contiguous()
        return same and self.num_bytes == out.nbytes


@dataclass(frozen=True)
class Transfer:
    """Bytes of a file from `start` to `stop`, read into `memory` or, where that is None, into scratch."""

    start: int
    stop: int
    memory: memoryview | None
    part: Part


def parts_of(values: StoredValues, box: Box, out: Tensor, block_bytes: int) -> Iterator[Part]:
    """Cuts a box of a stored tensor into reads, each of neighbouring bytes as far as that saves reading others."""
    strides = tuple(prod(values.shape[dim + 1 :]) for dim in range(len(values.shape)))
    start = values.start + values.dtype.itemsize * sum(a * b for a, b in zip(box.offsets, strides, strict=True))
    yield from _cut(Part(start, out, strides, values.dtype), block_bytes)


def _cut(part: Part, block_bytes: int) -> Iterator[Part]:
    """Cuts where a block or more lies between two rows, and what goes through scratch memory into pieces of it."""
    out, itemsize = part.out, part.dtype.itemsize
    dim = next((dim for dim, size in enumerate(out.shape) if size > 1), None)
    if dim is None or part.is_direct:
        yield part
        return
    row_bytes = part.strides[dim] * itemsize
    # Between rows of an outer dim lies at least as much as between those of an inner one.
    gap_bytes = row_bytes - (part.num_bytes - (out.shape[dim] - 1) * row_bytes)
    if gap_bytes < block_bytes and part.num_bytes <= READ_BYTES:
        yield part
        return
    rows = 1 if gap_bytes >= block_bytes else max(1, READ_BYTES // row_bytes)
    for first in range(0, out.shape[dim], rows):
        inner = out.narrow(dim, first, min(rows, out.shape[dim] - first))
        yield from _cut(Part(part.start + first * row_bytes, inner, part.strides, part.dtype), block_bytes)


def runs(parts: list[Part], block_bytes: int) -> Iterator[list[Transfer]]:
    """Gathers reads of one file that lie close together, so that each is one call and reads no block twice."""
    run: list[Transfer] = []
    for each in sorted(_transfers(parts, block_bytes), key=lambda each: each.start):
        if run:
            near = 0 <= each.start - run[-1].stop < block_bytes and each.stop - run[0].start <= READ_BYTES
            if not near or len(run) == MAX_TRANSFERS:
                yield run
                run = []
        run.append(each)
    if run:
        yield run


def _transfers(parts: list[Part], block_bytes: int) -> Iterator[Transfer]:
    for part in parts:
        stop = part.start + part.num_bytes
        if not part.is_direct:
            yield Transfer(part.start, stop, None, part)
            continue
        memory, start = memory_of(part.out), part.start
        while start < stop:
            # At the border of a block, so that no block is read for two reads.
            end = min((start + READ_BYTES) // block_bytes * block_bytes, stop)
            yield Transfer(start, end, memory[start - part.start : end - part.start], part)
            start = end
