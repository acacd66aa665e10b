"""Asks the operating system for large pages, with which new memory is there several times as fast."""

import ctypes

from torch import Tensor

LARGE_PAGE_BYTES = 2 << 20
"""Of x86-64, and of Arm with pages of 4 KiB; where they are larger, the hint is in vain."""

_LIBC = ctypes.CDLL(None)
_MADV_HUGEPAGE = 14


def use_large_pages(tensor: Tensor) -> None:
    """Hints that whole large pages within a plain tensor's memory may be used; does nothing where there are none.

    Memory that has just been taken has no pages yet; each is made when it is first touched, and the more there are,
    the longer that takes.

    Args:
        tensor: Contiguous, just made; on a GPU it is left alone.
    """
    advise = getattr(_LIBC, "madvise", None)
    if advise is None or tensor.device.type != "cpu" or tensor.nbytes < LARGE_PAGE_BYTES:
        return
    start = -(-tensor.data_ptr() // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    stop = (tensor.data_ptr() + tensor.nbytes) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if start < stop:
        # An error says that the system has no such pages, or that this is none of its kinds of memory.
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)
