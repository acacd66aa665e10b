"""Asks for large pages where a tensor is about to be filled, which costs less time than many small ones."""

import ctypes

from torch import Tensor

PAGE_BYTES = 2 << 20
"""The next size after 4 KiB on x86-64 and on most of ARM."""

_LIBC = ctypes.CDLL(None)
_MADV_HUGEPAGE = 14


def ask_for_large_pages(tensor: Tensor) -> None:
    """Advises the system; what it cannot or need not do it leaves alone.

    Args:
        tensor: Memory that nobody has used yet; only whole large pages within it are meant, so that it takes no more
            than it has.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    start = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    stop = (tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES
    advise = getattr(_LIBC, "madvise", None)
    if stop > start and advise is not None:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)
