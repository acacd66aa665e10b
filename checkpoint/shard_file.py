"""Writes one .safetensors file and the digests of its blocks, tensor after tensor, without a copy of them all."""

import ctypes
import errno
import math
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from checkpoint import filesystem
from checkpoint.manifest import StoredFile, digests_name
from checkpoint.safetensors_header import LENGTH_BYTES, build_header

Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Key -> dtype and shape."""

CHUNK_BYTES = 8 << 20
"""Bytes of one write, and of the memory that one thread takes."""
NUM_THREADS = 3
"""Enough for the disk to have a write at hand while others copy and hash."""


def memory_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which must outlive them; numpy, no dependency, would know no bfloat16."""
    return memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B")


def write(path: Path, entries: Entries, values: Iterable[Iterable[Tensor]], block_bytes: int) -> StoredFile:
    """Writes a new file and its digests, and waits until the disk has both.

    Args:
        path: Where; must not exist.
        entries: What the file holds, in the order of the values; readers are fastest when wide dtypes come first.
        values: For each entry its rows as one tensor or more, on any device, each asked for when its turn comes.
        block_bytes: Bytes under one digest.

    Returns:
        What the manifest says of the file.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If values are not what their entry says.
    """
    header = _padded(build_header(entries), block_bytes)
    num_bytes = len(header) + sum(math.prod(shape) * dtype.itemsize for dtype, shape in entries.values())
    descriptor = filesystem.create(path)
    try:
        table = _Stream(descriptor, num_bytes, block_bytes).write(_tensors(header, entries, values))
        filesystem.sync(descriptor)
    finally:
        os.close(descriptor)
    return StoredFile(num_bytes=num_bytes, digest=_write_digests(path, table))


def _write_digests(path: Path, table: bytes) -> str:
    descriptor = filesystem.create(path.with_name(digests_name(path.name)))
    try:
        filesystem.write(descriptor, [memoryview(table)])
        filesystem.sync(descriptor)
    finally:
        os.close(descriptor)
    return xxhash.xxh3_64_hexdigest(table)


_Chunk = Sequence[tuple[Tensor, int, int]]
"""Bytes that follow each other: contiguous tensors on the CPU, each with where in it they start and how many."""


class _Stream:
    """Copies bytes into pages of its own, hashes them there and writes them, on a few threads.

    From such pages a disk can take them itself: that costs a third of the processor time of writing through the page
    cache, has no cache to wait for at the end, and leaves in it what training reads.
    """

    def __init__(self, descriptor: int, num_bytes: int, block_bytes: int) -> None:
        unit = math.lcm(block_bytes, mmap.PAGESIZE)
        self.descriptor, self.num_bytes, self.block_bytes = descriptor, num_bytes, block_bytes
        self.chunk_bytes = max(CHUNK_BYTES // unit, 1) * unit
        self.digests = [b""] * -(-num_bytes // self.chunk_bytes)
        self.direct, self.failed, self.rest = False, False, b""
        self.lock = threading.Lock()

    def write(self, tensors: Iterable[Tensor]) -> bytes:
        """Writes all bytes and returns the digests of their blocks."""
        chunks = enumerate(_chunks(tensors, self.chunk_bytes))
        if len(self.digests) > 1:
            filesystem.set_size(self.descriptor, self.num_bytes)
            self.direct = filesystem.set_direct(self.descriptor, True)
            with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="checkpoint-write") as pool:
                for each in [pool.submit(self._work, chunks) for _ in range(NUM_THREADS)]:
                    each.result()
        else:
            self._work(chunks)
        if self.rest:
            filesystem.set_direct(self.descriptor, False)
            filesystem.write_at(self.descriptor, memoryview(self.rest), self.num_bytes - len(self.rest))
        return b"".join(self.digests)

    def _work(self, chunks: Iterator[tuple[int, _Chunk]]) -> None:
        pages = mmap.mmap(-1, min(self.chunk_bytes, self.num_bytes))
        try:
            while True:
                with self.lock:
                    index, chunk = next(chunks, (-1, ())) if not self.failed else (-1, ())
                if index < 0:
                    return
                view = _gather(chunk, pages)
                self.digests[index] = b"".join(
                    xxhash.xxh3_64_intdigest(view[start : start + self.block_bytes]).to_bytes(8, "little")
                    for start in range(0, len(view), self.block_bytes)
                )
                self._write(view, index * self.chunk_bytes)
        except BaseException:
            self.failed = True
            raise

    def _write(self, view: memoryview, offset: int) -> None:
        if self.direct:
            # Only whole pages can go; those of the last chunk may leave a rest.
            size = len(view) // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                filesystem.write_at(self.descriptor, view[:size], offset)
            except OSError as error:
                # Some file systems find out only here that they cannot.
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                filesystem.set_direct(self.descriptor, False)
            else:
                self.rest = bytes(view[size:]) or self.rest
                return
        filesystem.write_at(self.descriptor, view, offset)
        filesystem.start_writeback(self.descriptor, offset, len(view))


def _gather(chunk: _Chunk, pages: mmap.mmap) -> memoryview:
    """Copies bytes from many places into some pages."""
    address, size = ctypes.addressof(ctypes.c_char.from_buffer(pages)), 0
    for tensor, start, length in chunk:
        # Other than a copy between memoryviews, this one lets other threads run.
        ctypes.memmove(address + size, tensor.data_ptr() + start, length)
        size += length
    return memoryview(pages)[:size]


def _padded(header: bytes, block_bytes: int) -> bytes:
    """A header that ends with a block, so that damage to the one is no damage to the values behind it."""
    text = header[LENGTH_BYTES:] + b" " * (-len(header) % block_bytes)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _tensors(header: bytes, entries: Entries, values: Iterable[Iterable[Tensor]]) -> Iterator[Tensor]:
    """All bytes of a file in order."""
    yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for (key, (dtype, shape)), tensors in zip(entries.items(), values, strict=True):
        num_left = math.prod(shape)
        for tensor in tensors:
            num_left -= tensor.numel()
            if tensor.dtype != dtype or tensor.shape[1:] != shape[1:] or num_left < 0:
                num_left = -1
                break
            yield from _on_host(tensor.detach())
        if num_left:
            raise ValueError(
                f"{key} was announced as {dtype} {list(shape)}, but its values are others; a state must not change "
                "while it is saved"
            )


def _on_host(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of a tensor in order, contiguous on the CPU, copied a chunk at a time where they are not yet."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        yield tensor
    elif tensor.nbytes <= CHUNK_BYTES:
        yield tensor.cpu().contiguous()
    else:
        rows = max(1, CHUNK_BYTES * len(tensor) // tensor.nbytes)
        for part in tensor.split(rows) if len(tensor) > 1 else tensor:
            yield from _on_host(part)


def _chunks(tensors: Iterable[Tensor], chunk_bytes: int) -> Iterator[_Chunk]:
    """Cuts and gathers bytes into chunks of one size; the last may be smaller."""
    chunk: list[tuple[Tensor, int, int]] = []
    size = 0
    for tensor in tensors:
        start = 0
        while start < tensor.nbytes:
            length = min(tensor.nbytes - start, chunk_bytes - size)
            chunk.append((tensor, start, length))
            start, size = start + length, size + length
            if size == chunk_bytes:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk
