"""Reads a data file so that every byte that is handed out was held against the digest of its block."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

from checkpoint.files import open_plain
from checkpoint.manifest import StoredFile, digests_name
from checkpoint.safetensors_header import LENGTH_BYTES, FileHeader, header_length, parse_header

DIGEST_BYTES = 8
MAX_VECTORS = 1000
"""Linux reads into at most 1,024 places in one call."""


@dataclass(frozen=True)
class Extent:
    """Bytes of a file and where they go.

    Attributes:
        start: The first byte in the file.
        target: Memory that they fill.
    """

    start: int
    target: memoryview

    @property
    def stop(self) -> int:
        """The byte after the last."""
        return self.start + len(self.target)


class VerifiedFile:
    """A data file with its digests and its header, all checked; open only within `with`."""

    def __init__(self, path: Path, stored: StoredFile, block_bytes: int, remedy: str) -> None:
        """Reads and checks digests and header.

        Args:
            path: The file.
            stored: What the manifest says of it.
            block_bytes: Bytes under one digest.
            remedy: What to do about damage, for messages.

        Raises:
            ValueError: If a file is missing, a link or damaged; the message names file and byte range.
            OSError: If it cannot be read.
        """
        self.path, self.stored, self.block_bytes, self.remedy = path, stored, block_bytes, remedy
        self._digests = memoryview(self._read_digests()).cast("Q")
        with self:
            self.header = self._read_header()

    def __enter__(self) -> "VerifiedFile":
        """Opens the file."""
        self._descriptor = _open(self.path, self.stored.num_bytes)
        if hasattr(os, "posix_fadvise"):
            # Most of it will be read, in order: the disk may run further ahead.
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def read(self, extents: Sequence[Extent]) -> None:
        """Reads bytes and checks the blocks that hold them, each read once.

        Args:
            extents: What to read, ascending, not overlapping, at most a few hundred; what lies between two of them is
                read as well.

        Raises:
            ValueError: If a block is damaged, or the file is shorter than it should be.
            OSError: If it cannot be read.
        """
        start = extents[0].start // self.block_bytes * self.block_bytes
        stop = min(-(-extents[-1].stop // self.block_bytes) * self.block_bytes, self.stored.num_bytes)
        views, at = [], start
        for extent in extents:
            if extent.start > at:
                views.append(memoryview(bytearray(extent.start - at)))
            views.append(extent.target)
            at = extent.stop
        if stop > at:
            views.append(memoryview(bytearray(stop - at)))
        self._fill(views, start)
        for block in self._damaged(views, start):
            first = block * self.block_bytes
            raise ValueError(self.damage(first, min(first + self.block_bytes, self.stored.num_bytes)))

    def damaged(self, start: int, stop: int) -> list[str]:
        """Says what is damaged in a stretch of the file.

        Args:
            start: Where it begins, at a block.
            stop: Where it ends, at a block or with the file.

        Raises:
            OSError: If it cannot be read.
        """
        views = [memoryview(bytearray(stop - start))]
        try:
            self._fill(views, start)
        except ValueError as error:
            return [str(error)]
        size, end = self.block_bytes, self.stored.num_bytes
        return [self.damage(block * size, min((block + 1) * size, end)) for block in self._damaged(views, start)]

    def damage(self, start: int, stop: int) -> str:
        """Says which bytes are damaged and whose they are.

        Args:
            start: The first damaged byte.
            stop: The byte after the last.
        """
        header: FileHeader | None = getattr(self, "header", None)
        if header is None or start < header.num_bytes:
            what = "of the header, which says where its tensors lie"
        else:
            names = [
                repr(key)
                for key, values in header.tensors.items()
                if values.start < stop and start < values.start + values.num_bytes
            ]
            what = f"of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
        return f"{self.path} is damaged: bytes {start} to {stop}, {what}, do not have their digest; {self.remedy}"

    def _fill(self, views: Sequence[memoryview], start: int) -> None:
        """Reads from one place on into memory that lies in many."""
        pending = list(views)
        while pending:
            num_bytes = os.preadv(self._descriptor, pending[:MAX_VECTORS], start)
            if num_bytes == 0:
                raise ValueError(f"{self.path} ends at byte {start}, it was cut while it was read; {self.remedy}")
            start += num_bytes
            done = 0
            while num_bytes and num_bytes >= len(pending[done]):
                num_bytes -= len(pending[done])
                done += 1
            del pending[:done]
            if num_bytes:
                pending[0] = pending[0][num_bytes:]

    def _damaged(self, views: Sequence[memoryview], start: int) -> Iterator[int]:
        """Blocks, of bytes that lie in many places, that do not have their digest."""
        digests, size, block = self._digests, self.block_bytes, start // self.block_bytes
        whole_block = xxhash.xxh3_64_intdigest
        partial, partial_bytes = xxhash.xxh3_64(), 0
        for view in views:
            at = 0
            if partial_bytes:
                at = min(size - partial_bytes, len(view))
                partial.update(view[:at])
                partial_bytes += at
                if partial_bytes == size:
                    if partial.intdigest() != digests[block]:
                        yield block
                    partial, partial_bytes, block = xxhash.xxh3_64(), 0, block + 1
            stop = at + (len(view) - at) // size * size
            for first in range(at, stop, size):
                if whole_block(view[first : first + size]) != digests[block]:
                    yield block
                block += 1
            if stop < len(view):
                partial.update(view[stop:])
                partial_bytes += len(view) - stop
        if partial_bytes and partial.intdigest() != digests[block]:
            yield block

    def _read_digests(self) -> bytes:
        path = self.path.with_name(digests_name(self.path.name))
        size = -(-self.stored.num_bytes // self.block_bytes) * DIGEST_BYTES
        descriptor = _open(path, size)
        try:
            with os.fdopen(descriptor, "rb", closefd=False, buffering=0) as file:
                table = file.read(size)
        finally:
            os.close(descriptor)
        if len(table) != size or xxhash.xxh3_64_hexdigest(table) != self.stored.digest:
            raise ValueError(
                f"{path} is damaged or of another checkpoint: bytes 0 to {size}, the digests of all tensors of "
                f"{self.path.name}, do not have the digest that the manifest says; {self.remedy}"
            )
        return table

    def _read_header(self) -> FileHeader:
        first = bytearray(min(LENGTH_BYTES, self.stored.num_bytes))
        if first:
            self.read([Extent(0, memoryview(first))])
        where = str(self.path)
        text = bytearray(header_length(bytes(first), self.stored.num_bytes, where))
        self.read([Extent(LENGTH_BYTES, memoryview(text))])
        return parse_header(bytes(text), self.stored.num_bytes, where)


def _open(path: Path, num_bytes: int) -> int:
    """Opens a file that must have a size."""
    try:
        descriptor, size = open_plain(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; its checkpoint is not complete") from None
    if size != num_bytes:
        os.close(descriptor)
        raise ValueError(f"{path} has {size} bytes, but the manifest says {num_bytes}; it is damaged")
    return descriptor
