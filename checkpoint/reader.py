"""Reads any slices of any tensors of a checkpoint, each byte verified, and no file that they do not lie in."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from checkpoint.boxes import Box
from checkpoint.files import read_manifest
from checkpoint.manifest import Manifest, file_name
from checkpoint.owners import Owners, Piece
from checkpoint.safetensors_header import CODES, StoredValues
from checkpoint.shard_file import memory_of
from checkpoint.verified_file import Extent, VerifiedFile

T = TypeVar("T")

READ_BYTES = 4 << 20
"""Bytes of one read at most, also of memory that a read takes beside its target."""
MAX_EXTENTS = 400
NUM_THREADS = 2
"""One waits for the disk while the other hashes."""
FILES_AT_ONCE = 32


@dataclass(frozen=True)
class Slice:
    """A part of a stored tensor and the memory that it fills.

    Attributes:
        name: The tensor.
        offsets: Where the part starts.
        out: A tensor of the part's sizes, on any device; values are converted where its dtype is another one.
    """

    name: str
    offsets: tuple[int, ...]
    out: Tensor

    @property
    def box(self) -> Box:
        """The part."""
        return Box(self.offsets, tuple(self.out.shape))


@dataclass(frozen=True)
class _Part:
    """Values of a file that begin at a byte, and the memory that takes them.

    `strides` says how many values apart in the file are neighbours along each dim.
    """

    start: int
    out: Tensor
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """From the first value to the last, with all that lies in between."""
        steps = sum((size - 1) * stride for size, stride in zip(self.out.shape, self.strides, strict=True))
        return (1 + steps) * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the file can go straight to where they belong."""
        out = self.out
        same = out.dtype == self.dtype and out.device.type == "cpu" and out.is_contiguous()
        return same and self.num_bytes == out.nbytes


@dataclass(frozen=True)
class _Transfer:
    """Bytes of a file from `start` to `stop`, read into `memory` or, where that is None, into scratch."""

    start: int
    stop: int
    memory: memoryview | None
    part: _Part


@dataclass
class _FilePlan:
    file: VerifiedFile
    parts: list[_Part] = field(default_factory=list)


class Reads:
    """Reads of some slices, with all that can be refused beforehand refused."""

    def __init__(self, plans: Sequence[_FilePlan]) -> None:
        """Keeps what is to be read, by file."""
        self._plans = plans

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
                    for run in _runs(plan.parts, plan.file.block_bytes):
                        work.append(partial(_read, plan.file, run))
                        num_bytes += run[-1].stop - run[0].start
                for _ in in_threads(work, num_bytes):
                    pass


def in_threads(work: Sequence[Callable[[], T]], num_bytes: int) -> Iterator[T]:
    """Runs some calls on two threads, or right here where there is little to do.

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


class ShardReader:
    """Serves slices of the tensors of one checkpoint, whatever the mesh that wrote it; needs no process group."""

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        """Reads the manifest; opens no data file.

        Args:
            path: The folder of one step.
            manifest: Its manifest, where that is known.

        Raises:
            ValueError: If it is no complete checkpoint.
        """
        self.path = Path(path)
        self.manifest = read_manifest(path) if manifest is None else manifest
        self.owners = Owners(self.manifest.tensors)
        self._files: dict[int, VerifiedFile] = {}

    def read(
        self,
        name: str,
        offsets: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Reads a part of one tensor.

        Args:
            name: The tensor.
            offsets: Where the part starts; None: at the start of the tensor.
            sizes: Its sizes; None: up to the end of the tensor.
            out: What to fill, of these sizes; None: a new CPU tensor of the stored dtype.

        Raises:
            ValueError: If there is no such tensor or part, or what holds it is damaged.
            OSError: If a file cannot be read.
        """
        if name not in self.manifest.tensors:
            raise ValueError(f"{self.path} holds no tensor {name!r}")
        stored = self.manifest.tensors[name]
        offsets = (0,) * len(stored.shape) if offsets is None else tuple(offsets)
        if out is None:
            if sizes is None:
                sizes = [size - offset for size, offset in zip(stored.shape, offsets, strict=True)]
            self._check_inside(name, Box(offsets, tuple(sizes)))
            out = torch.empty(tuple(sizes), dtype=stored.dtype)
        self.prepare([Slice(name, offsets, out)]).run()
        return out

    def prepare(self, slices: Iterable[Slice]) -> Reads:
        """Finds where slices lie and checks the headers of the files that hold them; fills nothing.

        Raises:
            ValueError: If there is no such part of a tensor, or a file is missing or damaged or does not hold what the
                manifest says.
            OSError: If a file cannot be read.
        """
        plans: dict[int, _FilePlan] = {}
        for each in slices:
            self._check_inside(each.name, each.box)
            if each.out.numel() == 0:
                continue
            for piece in self.owners.overlapping(each.name, each.box):
                if piece.rank not in plans:
                    plans[piece.rank] = _FilePlan(self.file(piece.rank))
                plan = plans[piece.rank]
                shared = piece.box.overlap(each.box)
                if shared is not None:
                    values, within = self.check_entry(plan.file, piece), shared.within(piece.box)
                    plan.parts.extend(_parts(values, within, _narrow(each, shared), plan.file.block_bytes))
        return Reads([plans[rank] for rank in sorted(plans)])

    def file(self, rank: int) -> VerifiedFile:
        """The file that a rank wrote, its digests and header checked.

        Raises:
            ValueError: If it is missing or damaged.
            OSError: If it cannot be read.
        """
        if rank not in self._files:
            name = file_name(rank)
            if name not in self.manifest.files:
                raise ValueError(f"{self.path}: the manifest lists no file {name}, which must hold some tensors")
            remedy = f"delete the damaged folder {self.path}, and a run goes on from the checkpoint before it"
            stored = self.manifest.files[name]
            self._files[rank] = VerifiedFile(self.path / name, stored, self.manifest.block_bytes, remedy)
        return self._files[rank]

    def check_entry(self, file: VerifiedFile, piece: Piece) -> StoredValues:
        """Where a piece lies in its file.

        Raises:
            ValueError: If the file does not hold it, or with another dtype or shape.
        """
        stored = self.manifest.tensors[piece.name]
        key = piece.key(stored.shape)
        values = file.header.tensors.get(key)
        if values is None or values.dtype != stored.dtype or values.shape != piece.box.sizes:
            found = "nothing" if values is None else f"{CODES[values.dtype]} {list(values.shape)}"
            raise ValueError(
                f"{file.path} holds {found} as {key!r}, but the manifest says {CODES[stored.dtype]} "
                f"{list(piece.box.sizes)}; files of different checkpoints are mixed; {file.remedy}"
            )
        return values

    def _check_inside(self, name: str, box: Box) -> None:
        stored = self.manifest.tensors.get(name)
        if stored is None:
            raise ValueError(f"{self.path} holds no tensor {name!r}")
        inside = len(box.offsets) == len(box.sizes) == len(stored.shape) and all(
            offset >= 0 and size >= 0 and offset + size <= limit
            for offset, size, limit in zip(box.offsets, box.sizes, stored.shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"{name} of shape {list(stored.shape)} has no part of sizes {list(box.sizes)} at {list(box.offsets)}"
            )


def _narrow(whole: Slice, box: Box) -> Tensor:
    """The memory of a slice that a part of it fills."""
    out = whole.out.detach()
    for dim, (offset, size) in enumerate(zip(box.within(whole.box).offsets, box.sizes, strict=True)):
        out = out.narrow(dim, offset, size)
    return out


def _parts(values: StoredValues, box: Box, out: Tensor, block_bytes: int) -> Iterator[_Part]:
    """Cuts a box of a stored tensor into reads, each of neighbouring bytes as far as that saves reading others."""
    strides = tuple(prod(values.shape[dim + 1 :]) for dim in range(len(values.shape)))
    start = values.start + values.dtype.itemsize * sum(a * b for a, b in zip(box.offsets, strides, strict=True))
    yield from _cut(_Part(start, out, strides, values.dtype), block_bytes)


def _cut(part: _Part, block_bytes: int) -> Iterator[_Part]:
    """Cuts where a block or more lies between two rows, and what goes through scratch memory into pieces of it."""
    out, itemsize = part.out, part.dtype.itemsize
    dim = next((dim for dim, size in enumerate(out.shape) if size > 1), None)
    if dim is None or part.is_direct:
        yield part
        return
    row_bytes = part.strides[dim] * itemsize
    # Between rows of an outer dim lies at least as much as between those of an inner one.
    gap_bytes = row_bytes - (part.num_bytes - (out.shape[dim] - 1) * row_bytes)
    if gap_bytes < block_bytes and part.num_bytes <= READ_BYTES:
        yield part
        return
    rows = 1 if gap_bytes >= block_bytes else max(1, READ_BYTES // row_bytes)
    for first in range(0, out.shape[dim], rows):
        inner = out.narrow(dim, first, min(rows, out.shape[dim] - first))
        yield from _cut(_Part(part.start + first * row_bytes, inner, part.strides, part.dtype), block_bytes)


def _runs(parts: list[_Part], block_bytes: int) -> Iterator[list[_Transfer]]:
    """Gathers reads of one file that lie close together, so that each is one call and reads no block twice."""
    run: list[_Transfer] = []
    for each in sorted(_transfers(parts, block_bytes), key=lambda each: each.start):
        if run:
            near = 0 <= each.start - run[-1].stop < block_bytes and each.stop - run[0].start <= READ_BYTES
            if not near or len(run) == MAX_EXTENTS:
                yield run
                run = []
        run.append(each)
    if run:
        yield run


def _transfers(parts: list[_Part], block_bytes: int) -> Iterator[_Transfer]:
    for part in parts:
        stop = part.start + part.num_bytes
        if not part.is_direct:
            yield _Transfer(part.start, stop, None, part)
            continue
        memory, start = memory_of(part.out), part.start
        while start < stop:
            # At the border of a block, so that no block is read for two reads.
            end = min((start + READ_BYTES) // block_bytes * block_bytes, stop)
            yield _Transfer(start, end, memory[start - part.start : end - part.start], part)
            start = end


def _read(file: VerifiedFile, run: list[_Transfer]) -> None:
    """Reads what lies close together, then hands on what went through scratch memory."""
    scratch = {
        index: torch.empty(each.stop - each.start, dtype=torch.uint8)
        for index, each in enumerate(run)
        if each.memory is None
    }
    targets = [each.memory or memory_of(scratch[index]) for index, each in enumerate(run)]
    file.read([Extent(each.start, target) for each, target in zip(run, targets, strict=True)])
    for index, values in scratch.items():
        part = run[index].part
        part.out.copy_(values.view(part.dtype).as_strided(part.out.shape, part.strides))
