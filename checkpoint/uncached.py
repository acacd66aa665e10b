"""Reads stretches of files past the page cache where that saves a copy, and not where they are in it already."""

import ctypes
import mmap
import os
from contextlib import suppress
from types import TracebackType
from typing import Self

MIN_BYTES = 256 << 10
"""Less is not worth a read of its own kind."""

_LIBC = ctypes.CDLL(None)
_CACHESTAT = 451
"""Number of the call on all kinds of machines; Linux has it since 6.5, and no C library names it."""


class Pages:
    """Memory that one thread reads into, in whole pages, as a disk can fill them itself.

    Attributes:
        num_bytes: The longest stretch that is read.
    """

    def __init__(self, num_bytes: int) -> None:
        """Takes it.

        Args:
            num_bytes: The longest stretch that is read.
        """
        self.num_bytes = num_bytes
        # A stretch may begin and end within a page.
        self._memory = mmap.mmap(-1, num_bytes + 2 * mmap.PAGESIZE)

    def read(self, descriptor: int, start: int, stop: int) -> memoryview | None:
        """Reads a stretch of a file.

        Args:
            descriptor: Opened with O_DIRECT.
            start: Its first byte.
            stop: The byte after its last.

        Returns:
            Its bytes, valid until the next call; None if the file system does not read in this way, or the file has
            ended.
        """
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        view, done = memoryview(self._memory)[: -(-(stop - first) // mmap.PAGESIZE) * mmap.PAGESIZE], 0
        while first + done < stop:
            try:
                count = os.preadv(descriptor, [view[done:]], first + done)
            except OSError:
                # Whatever it is, a plain read meets it too, unless it is one of this way alone.
                return None
            if count == 0:
                return None
            done += count
        return view[start - first : stop - first]


class OpenFile:
    """An open file whose bytes come past the page cache, unless they are in it or that cannot be.

    Attributes:
        descriptor: The file.
    """

    def __init__(self, descriptor: int) -> None:
        """Takes over a descriptor; use it as a context manager, which closes it.

        Args:
            descriptor: The file.
        """
        self.descriptor = descriptor
        self._uncached: int | None = None
        with suppress(OSError, AttributeError):
            self._uncached = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def __enter__(self) -> Self:
        """Nothing to do yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file."""
        os.close(self.descriptor)
        if self._uncached is not None:
            os.close(self._uncached)

    def read(self, start: int, stop: int, pages: Pages | None) -> memoryview | None:
        """Bytes past the page cache, in the memory of the pages; None: read them from the descriptor.

        Args:
            start: The first one.
            stop: The one after the last.
            pages: Memory of this thread; None: read through the cache.
        """
        if pages is None or self._uncached is None or stop - start < MIN_BYTES:
            return None
        return None if is_cached(self.descriptor, start, stop) else pages.read(self._uncached, start, stop)


class _Stretch(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "lately"))


def is_cached(descriptor: int, start: int, stop: int) -> bool:
    """Whether most of a stretch of a file is in the page cache.

    Args:
        descriptor: The file.
        start: Its first byte.
        stop: The byte after its last.

    Returns:
        True as well where the system does not say.
    """
    counts = _Counts()
    asked = _Stretch(start, stop - start)
    if _LIBC.syscall(_CACHESTAT, descriptor, ctypes.byref(asked), ctypes.byref(counts), 0) != 0:
        return True
    return int(counts.cached) * mmap.PAGESIZE * 2 > stop - start


def copy(target: memoryview, source: memoryview) -> None:
    """Copies bytes and lets other threads run, which an assignment between memoryviews does not.

    Args:
        target: Memory that is writable.
        source: As many bytes, of writable memory too.
    """
    if len(target):
        start, from_start = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (target, source))
        ctypes.memmove(start, from_start, len(target))
