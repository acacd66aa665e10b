"""The plain writes and reads of bytes that storage is measured against: nothing but the bytes, in large pieces."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from checkpoint import filesystem

CHUNK_BYTES = 8 << 20

Views = Sequence[memoryview]
Action = Callable[[Path, Views], None]


def write_buffered(path: Path, views: Views) -> None:
    """One thread through the page cache; the disk starts early, the file is synced.

    Args:
        path: A new file.
        views: What to write.
    """
    descriptor, offset = filesystem.create(path), 0
    for _, view in _chunks(views):
        filesystem.write(descriptor, [view])
        filesystem.start_writeback(descriptor, offset, len(view))
        offset += len(view)
    filesystem.sync(descriptor)
    os.close(descriptor)


def write_direct(path: Path, views: Views, num_threads: int) -> None:
    """Some threads past the page cache, from pages that they copy to.

    Args:
        path: A new file.
        views: What to write.
        num_threads: Threads.
    """
    num_bytes = sum(map(len, views))
    descriptor, chunks = filesystem.create(path), list(_whole_chunks(views))
    filesystem.set_size(descriptor, num_bytes)
    filesystem.set_direct(descriptor, True)

    def work(first: int) -> None:
        pages = mmap.mmap(-1, CHUNK_BYTES)
        for index in range(first, len(chunks), num_threads):
            size = 0
            for view in chunks[index]:
                source = ctypes.addressof(ctypes.c_char.from_buffer(view))
                ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(pages)) + size, source, len(view))
                size += len(view)
            # The last one is filled up to whole pages: as many bytes, and no second call.
            size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            filesystem.write_at(descriptor, memoryview(pages)[:size], index * CHUNK_BYTES)

    _on_threads(work, num_threads)
    filesystem.sync(descriptor)
    os.close(descriptor)


def read(path: Path, views: Views, num_threads: int) -> None:
    """Reads a file into memory.

    Args:
        path: The file.
        views: What to fill.
        num_threads: Threads.
    """
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    chunks = list(_chunks(views))

    def work(first: int) -> None:
        for offset, view in chunks[first::num_threads]:
            os.preadv(descriptor, [view], offset)

    _on_threads(work, num_threads)
    os.close(descriptor)


def read_direct(path: Path, views: Views, num_threads: int) -> None:
    """Some threads past the page cache, into pages that they copy from.

    Args:
        path: The file.
        views: What to fill.
        num_threads: Threads.
    """
    descriptor, chunks = os.open(path, os.O_RDONLY), list(_whole_chunks(views))
    filesystem.set_direct(descriptor, True)

    def work(first: int) -> None:
        pages = mmap.mmap(-1, CHUNK_BYTES)
        for index in range(first, len(chunks), num_threads):
            os.preadv(descriptor, [pages], index * CHUNK_BYTES)
            size = 0
            for view in chunks[index]:
                target = ctypes.addressof(ctypes.c_char.from_buffer(view))
                ctypes.memmove(target, ctypes.addressof(ctypes.c_char.from_buffer(pages)) + size, len(view))
                size += len(view)

    _on_threads(work, num_threads)
    os.close(descriptor)


WRITES: dict[str, Action] = {
    "plain write": write_buffered,
    **{f"direct write, {n} threads": partial(write_direct, num_threads=n) for n in (2, 3)},
}
READS: dict[str, Action] = {
    **{f"plain read, {n} threads": partial(read, num_threads=n) for n in (1, 2)},
    "direct read, 2 threads": partial(read_direct, num_threads=2),
}


def set_cached(folder: Path, cached: bool) -> None:
    """Reads all files of a folder into the page cache, or drops them from it.

    Args:
        folder: The folder.
        cached: Whether they are to be in it.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            size = os.fstat(descriptor).st_size
            if cached:
                for offset in range(0, size, CHUNK_BYTES):
                    os.pread(descriptor, CHUNK_BYTES, offset)
            else:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def refill_free_memory(num_bytes: int) -> None:
    """Has the machine hold as much free memory, as one that is in use for long does.

    A virtual machine may hand freed memory back to its host, when it pleases, and take three times as long to get it
    again as a disk to read as much: without this the dice say which contender pays for the pages that its file is
    cached in.

    Args:
        num_bytes: What a contender needs at most, less whatever other ranks ask for at the same time.
    """
    with mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE) as pages:
        pages[:: mmap.PAGESIZE] = bytes(len(pages) // mmap.PAGESIZE)


def _chunks(views: Views) -> Iterator[tuple[int, memoryview]]:
    """Pieces of each view, with where they lie when all follow each other."""
    offset = 0
    for view in views:
        for start in range(0, len(view), CHUNK_BYTES):
            yield offset + start, view[start : start + CHUNK_BYTES]
        offset += len(view)


def _whole_chunks(views: Views) -> Iterator[list[memoryview]]:
    """Pieces of all views, gathered to one size."""
    chunk: list[memoryview] = []
    size = 0
    for view in views:
        start = 0
        while start < len(view):
            part = view[start : start + CHUNK_BYTES - size]
            chunk.append(part)
            start, size = start + len(part), size + len(part)
            if size == CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def _on_threads(work: Callable[[int], None], num_threads: int) -> None:
    with ThreadPoolExecutor(num_threads) as pool:
        for each in [pool.submit(work, first) for first in range(num_threads)]:
            each.result()
