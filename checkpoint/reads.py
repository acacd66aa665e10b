"""Fills memory from data files, a few large reads at a time."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from checkpoint.extents import READ_BYTES, Part, Transfer, runs
from checkpoint.shard_file import memory_of
from checkpoint.verified_file import Extent, VerifiedFile

T = TypeVar("T")

NUM_THREADS = 2
"""One hashes while the disk works for the other. More gain nothing, nor does telling the disk of reads ahead: Linux
then asks it for less at a time."""
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

    def __init__(self, plans: Sequence[FilePlan]) -> None:
        """Keeps what is to be read.

        Args:
            plans: By file.
        """
        self._plans = plans

    @property
    def file_bytes(self) -> int:
        """Bytes that `run` reads of files: what is wanted, and the rest of each block that some of it lies in."""
        total = 0
        for plan in self._plans:
            size, end = plan.file.block_bytes, plan.file.stored.num_bytes
            for run in runs(plan.parts, size):
                total += min(-(-run[-1].stop // size) * size, end) - run[0].start // size * size
        return total

    def run(self) -> None:
        """Fills the memory of all slices.

        Raises:
            ValueError: If a block is damaged; memory is then partly filled.
            OSError: If a file cannot be read.
        """
        for first in range(0, len(self._plans), FILES_AT_ONCE):
            with ExitStack() as stack:
                work, num_bytes = list[Callable[[], None]](), 0
                for plan in self._plans[first : first + FILES_AT_ONCE]:
                    stack.enter_context(plan.file)
                    for run in runs(plan.parts, plan.file.block_bytes):
                        work.append(partial(_read, plan.file, run))
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


def _read(file: VerifiedFile, run: list[Transfer]) -> None:
    """Reads what lies close together, then hands on what went through scratch memory."""
    scratch = {
        index: torch.empty(each.stop - each.start, dtype=torch.uint8)
        for index, each in enumerate(run)
        if each.memory is None
    }
    targets = [each.memory or memory_of(scratch[index]) for index, each in enumerate(run)]
    extents = [Extent(each.start, target) for each, target in zip(run, targets, strict=True)]
    file.read(extents)
    for index, values in scratch.items():
        part = run[index].part
        part.out.copy_(values.view(part.dtype).as_strided(part.out.shape, part.strides))
