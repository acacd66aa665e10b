"""Reads and writes a box of a tensor that lies row-major in a file, touching no other byte of it."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from checkpoint import filesystem
from checkpoint.boxes import Box
from checkpoint.safetensors_header import StoredValues
from checkpoint.shard_file import memory_of

BLOCK_BYTES = 1 << 20
"""Memory for values that are cast or rearranged, or that lie on another device; few enough to stay in the cache."""
READ_BYTES = 4 << 20
"""Bytes of one read at most."""
MAX_WRITE_BYTES = 1 << 30
"""Linux writes at most 2 GiB in one call."""

_MADVISE = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
_MADV_POPULATE_WRITE = 23


class Scratch:
    """Memory that one thread reads into and writes from, made when it is first needed."""

    def __init__(self) -> None:
        """Takes no memory yet."""
        self._memory: Tensor | None = None

    def take(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for values on the CPU, valid until the next call.

        Args:
            sizes: Their shape; `BLOCK_BYTES` at most.
            dtype: Their type.
            device: Where they come from or go to.
        """
        if self._memory is None:
            self._memory = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return self._memory[: prod(sizes) * dtype.itemsize].view(dtype).view(sizes)


def read_box(descriptor: int, values: StoredValues, box: Box, target: Tensor, scratch: Scratch) -> int:
    """Fills a tensor with a box of stored values, straight from the file where that is possible.

    Args:
        descriptor: The file, open.
        values: Where the whole tensor lies in it.
        box: The part to read.
        target: What to fill, of the box's sizes; on any device, of any dtype and strides.
        scratch: Memory of this thread.

    Returns:
        Bytes read from the file.

    Raises:
        OSError: If they cannot be read.
        ValueError: If the file ends before them.
    """
    if target.numel() == 0:
        return 0
    if _is_file_memory(target, values):
        view = memory_of(target)
        for start, length in _runs(values, box):
            _read(descriptor, view[:length], start)
            view = view[length:]
    else:
        for part, slab in slabs(box, target, BLOCK_BYTES * target.dtype.itemsize // values.dtype.itemsize):
            room = scratch.take(part.sizes, values.dtype, target.device)
            read_box(descriptor, values, part, room, scratch)
            slab.copy_(room)
    return target.numel() * values.dtype.itemsize


def write_box(descriptor: int, values: StoredValues, box: Box, source: Tensor, scratch: Scratch) -> None:
    """Writes a tensor to its place in a file, cast to the dtype that the file has for it.

    Args:
        descriptor: The file.
        values: Where the whole tensor lies in it.
        box: Which part of the whole the source is.
        source: The values, of the box's sizes; on any device, of any dtype and strides.
        scratch: Memory of this thread.

    Raises:
        OSError: If they cannot be written.
        ValueError: If a finite value has no finite one in the file's dtype.
    """
    if source.numel() == 0:
        return
    if _is_file_memory(source, values):
        view = memory_of(source)
        for start, length in _runs(values, box):
            filesystem.write_at(descriptor, view[:length], start)
            view = view[length:]
    else:
        for part, slab in slabs(box, source, BLOCK_BYTES * source.dtype.itemsize // values.dtype.itemsize):
            room = scratch.take(part.sizes, values.dtype, source.device)
            room.copy_(slab)
            _refuse_overflow(slab, room)
            write_box(descriptor, values, part, room, scratch)


def _is_file_memory(tensor: Tensor, values: StoredValues) -> bool:
    """Whether a tensor's memory is byte for byte what the file has."""
    return tensor.dtype == values.dtype and tensor.device.type == "cpu" and tensor.is_contiguous()


def _refuse_overflow(before: Tensor, after: Tensor) -> None:
    if not before.is_floating_point() or torch.finfo(before.dtype).max <= torch.finfo(after.dtype).max:
        return
    if before.isfinite().all() and not after.isfinite().all():
        limit = torch.finfo(after.dtype).max
        raise ValueError(f"values up to {before.abs().max().item():g} are beyond {limit:g}, the largest {after.dtype}")


def slabs(box: Box, tensor: Tensor, max_bytes: int) -> Iterator[tuple[Box, Tensor]]:
    """Parts of a box with the same of its tensor, along the first dims where possible.

    Args:
        box: The box.
        tensor: Values of its sizes.
        max_bytes: Most bytes of a part, of the tensor's dtype; at least one value.
    """
    if tensor.nbytes <= max_bytes:
        yield box, tensor
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    num_rows = box.sizes[dim]
    step = max(1, max_bytes * num_rows // tensor.nbytes)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        yield from slabs(box.rows(dim, start, stop), tensor.narrow(dim, start, stop - start), max_bytes)


def _runs(values: StoredValues, box: Box) -> Iterator[tuple[int, int]]:
    """First byte and length of the stretches of a file that hold a box, in order, those that touch as one."""
    # Dims from `inner` on are whole, so that they and the one before them lie in one stretch.
    inner = len(values.shape)
    while inner > 1 and box.sizes[inner - 1] == values.shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    length = prod(box.sizes[outer:]) * values.dtype.itemsize
    for start in _places(values, box, outer):
        for at in range(0, length, MAX_WRITE_BYTES):
            yield start + at, min(MAX_WRITE_BYTES, length - at)


def _places(values: StoredValues, box: Box, num_dims: int) -> Iterator[int]:
    """The first byte of a box for each index of its first dims."""
    strides = [prod(values.shape[dim + 1 :]) * values.dtype.itemsize for dim in range(len(values.shape))]
    start = values.start + sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))

    def places(base: int, dim: int) -> Iterator[int]:
        if dim == num_dims:
            yield base
            return
        for index in range(box.sizes[dim]):
            yield from places(base + index * strides[dim], dim + 1)

    return places(start, 0)


def _read(descriptor: int, view: memoryview, start: int) -> None:
    while len(view):
        _make_pages(view[:READ_BYTES])
        count = os.preadv(descriptor, [view[:READ_BYTES]], start)
        if count == 0:
            raise ValueError(f"it ends before byte {start + len(view)}; it is damaged")
        view, start = view[count:], start + count


def _make_pages(view: memoryview) -> None:
    """Has the kernel find pages for new memory all at once, which takes less time than one after the other."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + len(view)) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0 and _MADVISE is not None:
        # Older kernels refuse it; pages then come as they are filled.
        _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
