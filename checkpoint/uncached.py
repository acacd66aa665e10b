"""Reads stretches of files past the page cache where that saves a copy, and not where they are in it already."""

import ctypes
import mmap
import os
from contextlib import suppress

MIN_BYTES = 256 << 10
"""Less is not worth a read of its own kind."""

_LIBC = ctypes.CDLL(None)
_CACHESTAT = 451
"""Number of the call on all kinds of machines; Linux has it since 6.5, and no C library names it."""


class Pages:
    """Memory that one thread reads into, in whole pages, as a disk can fill them itself."""

    def __init__(self, num_bytes: int) -> None:
        """Takes it.

        Args:
            num_bytes: The longest stretch that is read.
        """
        # A stretch may begin and end within a page.
        self._memory = mmap.mmap(-1, num_bytes + 2 * mmap.PAGESIZE)

    def read(self, descriptor: int, start: int, stop: int) -> memoryview | None:
        """Reads a stretch of a file.

        Args:
            descriptor: From `open_uncached`.
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


def open_uncached(descriptor: int) -> int | None:
    """Opens a file again, for reads that leave the page cache alone.

    Args:
        descriptor: The file.

    Returns:
        A second descriptor, to be closed by the caller; None if the system has no such reads.
    """
    with suppress(OSError, AttributeError):
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    return None


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
