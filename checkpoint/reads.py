"""Fills memory from data files, a few large reads at a time."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from checkpoint.extents import READ_BYTES, Part, Transfer, runs
from checkpoint.shard_file import memory_of
from checkpoint.uncached import Pages
from checkpoint.verified_file import Extent, VerifiedFile

T = TypeVar("T")

NUM_THREADS = 3
"""Two reads for the disk to work on while a third thread hashes and copies."""
FILES_AT_ONCE = 32


@dataclass
class FilePlan:
    """What is read of one file.

    Attributes:
        file: The file.
        parts: What is read.
    """

    file: VerifiedFile
    parts: list[Part] = field(default_factory=list)


class Reads:
    """Reads of some slices, with all that can be refused beforehand refused."""

    def __init__(self, plans: Sequence[FilePlan], whole_bytes: int) -> None:
        """Keeps what is to be read.

        Args:
            plans: By file.
            whole_bytes: Bytes of all tensors of which some part is read.
        """
        self._plans, self._whole_bytes = plans, whole_bytes

    @property
    def share(self) -> float:
        """What is read of these tensors, as a share of them."""
        num_bytes = sum(part.out.numel() * part.dtype.itemsize for plan in self._plans for part in plan.parts)
        return num_bytes / max(self._whole_bytes, 1)

    @property
    def file_bytes(self) -> int:
        """Bytes that `run` reads of files: what is wanted, and the rest of each block that some of it lies in."""
        total = 0
        for plan in self._plans:
            size, end = plan.file.block_bytes, plan.file.stored.num_bytes
            for run in runs(plan.parts, size):
                total += min(-(-run[-1].stop // size) * size, end) - run[0].start // size * size
        return total

    def run(self, *, shared: bool = True) -> None:
        """Fills the memory of all slices.

        Args:
            shared: Whether others on this machine may read the same bytes, so that it is worth while to have them in
                its page cache. What is in there is read from there in any case.

        Raises:
            ValueError: If a block is damaged; memory is then partly filled.
            OSError: If a file cannot be read.
        """
        for first in range(0, len(self._plans), FILES_AT_ONCE):
            with ExitStack() as stack:
                work, num_bytes, own = list[Callable[[], None]](), 0, _Own(shared)
                for plan in self._plans[first : first + FILES_AT_ONCE]:
                    stack.enter_context(plan.file)
                    for run in runs(plan.parts, plan.file.block_bytes):
                        work.append(partial(_read, plan.file, run, own))
                        num_bytes += run[-1].stop - run[0].start
                for _ in in_threads(work, num_bytes):
                    pass


def in_threads(work: Sequence[Callable[[], T]], num_bytes: int) -> Iterator[T]:
    """Runs some calls on a few threads, or right here where there is little to do.

    Args:
        work: The calls; after an error no more are started, and those that run come to their end.
        num_bytes: Bytes that they read in all.

    Yields:
        Their results, in their order.
    """
    if num_bytes <= READ_BYTES:
        yield from (call() for call in work)
        return
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="checkpoint-read") as pool:
        futures = [pool.submit(call) for call in work]
        try:
            yield from (future.result() for future in futures)
        finally:
            pool.shutdown(cancel_futures=True)


class _Own(threading.local):
    """Memory of each thread, made when it is first needed."""

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._pages: Pages | None = None

    def pages(self, num_bytes: int) -> Pages | None:
        """Room to read that many bytes past the page cache; None where they are to go through it."""
        if self._shared:
            return None
        if self._pages is None or self._pages.num_bytes < num_bytes:
            self._pages = Pages(max(num_bytes, READ_BYTES))
        return self._pages


def _read(file: VerifiedFile, run: list[Transfer], own: _Own) -> None:
    """Reads what lies close together, then hands on what went through scratch memory."""
    scratch = {
        index: torch.empty(each.stop - each.start, dtype=torch.uint8)
        for index, each in enumerate(run)
        if each.memory is None
    }
    targets = [each.memory or memory_of(scratch[index]) for index, each in enumerate(run)]
    extents = [Extent(each.start, target) for each, target in zip(run, targets, strict=True)]
    file.read(extents, own.pages(run[-1].stop - run[0].start + 2 * file.block_bytes))
    for index, values in scratch.items():
        part = run[index].part
        part.out.copy_(values.view(part.dtype).as_strided(part.out.shape, part.strides))
