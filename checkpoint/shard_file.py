"""Writes one .safetensors file and the digests of its blocks, tensor after tensor, without a copy of them all."""

import ctypes
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import TracebackType

import torch
import xxhash
from torch import Tensor

from checkpoint import filesystem
from checkpoint.manifest import StoredFile, digests_name
from checkpoint.safetensors_header import LENGTH_BYTES, build_header

BATCH_BYTES = 4 << 20
"""Bytes of one write: enough to hide a call, few enough to be in the cache when they are hashed."""
BATCHES_AHEAD = 4
"""Batches that may be written before they are hashed."""


def memory_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which must outlive them; numpy, no dependency, would know no bfloat16."""
    return memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B")


def write(
    path: Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    values: Iterable[Iterable[Tensor]],
    block_bytes: int,
) -> StoredFile:
    """Writes a new file and its digests, and waits until the disk has both.

    Args:
        path: Where; must not exist.
        entries: Key -> dtype and shape, in the order of the values; readers are fastest when wide dtypes come first.
        values: For each entry its rows as one tensor or more, on any device, each asked for when its turn comes.
        block_bytes: Bytes under one digest.

    Returns:
        What the manifest says of the file.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If a tensor is not what its entry says.
    """
    descriptor = filesystem.create(path)
    try:
        num_bytes = 0
        with BlockDigests(block_bytes) as digests:
            for batch in _batches(_padded(build_header(entries), block_bytes), _announced(entries, values)):
                filesystem.write(descriptor, [view for view, _ in batch])
                digests.update(batch)
                size = sum(len(view) for view, _ in batch)
                filesystem.start_writeback(descriptor, num_bytes, size)
                num_bytes += size
        filesystem.sync(descriptor)
    finally:
        os.close(descriptor)
    return StoredFile(num_bytes=num_bytes, digest=_write_digests(path, digests.table))


def _write_digests(path: Path, table: bytes) -> str:
    descriptor = filesystem.create(path.with_name(digests_name(path.name)))
    try:
        filesystem.write(descriptor, [memoryview(table)])
        filesystem.sync(descriptor)
    finally:
        os.close(descriptor)
    return xxhash.xxh3_64_hexdigest(table)


def _padded(header: bytes, block_bytes: int) -> bytes:
    """A header that ends with a block, so that damage to the one is no damage to the values behind it."""
    text = header[LENGTH_BYTES:] + b" " * (-len(header) % block_bytes)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


Batch = Sequence[tuple[memoryview, object]]
"""Bytes that follow each other, each with what keeps its memory alive."""


class BlockDigests:
    """Hashes a stream of bytes block by block, in a thread of its own."""

    def __init__(self, block_bytes: int) -> None:
        """Starts with no bytes.

        Args:
            block_bytes: Bytes under one digest.
        """
        self.block_bytes = block_bytes
        self._digests = bytearray()
        self._open, self._open_bytes = xxhash.xxh3_64(), 0
        self._batches: queue.Queue[Batch | None] = queue.Queue(BATCHES_AHEAD)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="block-digests", daemon=True)

    def __enter__(self) -> "BlockDigests":
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until all is hashed."""
        self._batches.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def table(self) -> bytes:
        """8 bytes for each block, little-endian; complete once the stream has ended."""
        last = self._open.intdigest().to_bytes(8, "little") if self._open_bytes else b""
        return bytes(self._digests) + last

    def update(self, batch: Batch) -> None:
        """Takes bytes that follow those before; they must not change until the stream has ended."""
        self._batches.put(batch)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                for view, _ in batch:
                    self._hash(view)
            except Exception as error:
                # On with the queue: the writer must not wait for ever.
                self._error = error

    def _hash(self, view: memoryview) -> None:
        at = 0
        if self._open_bytes:
            at = min(self.block_bytes - self._open_bytes, len(view))
            self._open.update(view[:at])
            self._open_bytes += at
            if self._open_bytes == self.block_bytes:
                self._digests += self._open.intdigest().to_bytes(8, "little")
                self._open, self._open_bytes = xxhash.xxh3_64(), 0
        stop = at + (len(view) - at) // self.block_bytes * self.block_bytes
        for start in range(at, stop, self.block_bytes):
            self._digests += xxhash.xxh3_64_intdigest(view[start : start + self.block_bytes]).to_bytes(8, "little")
        if stop < len(view):
            self._open.update(view[stop:])
            self._open_bytes += len(view) - stop


def _announced(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], values: Iterable[Iterable[Tensor]]
) -> Iterator[Tensor]:
    for (key, (dtype, shape)), tensors in zip(entries.items(), values, strict=True):
        num_left = prod(shape)
        for tensor in tensors:
            num_left -= tensor.numel()
            if tensor.dtype != dtype or tensor.shape[1:] != shape[1:] or num_left < 0:
                num_left = -1
                break
            yield tensor.detach()
        if num_left:
            raise ValueError(
                f"{key} was announced as {dtype} {list(shape)}, but its values are others; a state must not change "
                "while it is saved"
            )


def _batches(header: bytes, tensors: Iterable[Tensor]) -> Iterator[Batch]:
    """Cuts and gathers bytes into batches of about the same size."""
    batch: list[tuple[memoryview, object]] = []
    size = 0
    for view, owner in _views(header, tensors):
        at = 0
        while at < len(view):
            part = view[at : at + BATCH_BYTES - size]
            batch.append((part, owner))
            at, size = at + len(part), size + len(part)
            if size == BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _views(header: bytes, tensors: Iterable[Tensor]) -> Iterator[tuple[memoryview, object]]:
    yield memoryview(header), header
    for tensor in tensors:
        for part in _on_host(tensor):
            yield memory_of(part), part


def _on_host(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of a tensor in order, contiguous on the CPU, copied a batch at a time where they are not yet."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        yield tensor
    elif tensor.nbytes <= BATCH_BYTES:
        yield tensor.cpu().contiguous()
    else:
        rows = max(1, BATCH_BYTES * len(tensor) // tensor.nbytes)
        for part in tensor.split(rows) if len(tensor) > 1 else tensor:
            yield from _on_host(part)
