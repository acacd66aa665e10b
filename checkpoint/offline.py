"""Writes checkpoints without a model or a process group, from whatever can read parts of tensors."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from checkpoint import files, filesystem, shard_file, steps
from checkpoint.boxes import Box
from checkpoint.layout import Layout, replicated
from checkpoint.manifest import BLOCK_BYTES, Header, Manifest, file_name
from checkpoint.owners import Owners, StoredTensor

MAX_FILES = 4096
"""Most files that one process divides a checkpoint over."""
FILE_BYTES = 1 << 30
"""Bytes of a file where nobody says how many files there are."""
SLAB_BYTES = 16 << 20
"""Values that are read at a time."""

Progress = Callable[[int], None]
"""Is told of bytes that are done since the last call."""


class Source(Protocol):
    """Tensors of which parts can be read."""

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Canonical name -> dtype and shape."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, on the CPU."""
        ...


def total_bytes(source: Source) -> int:
    """Bytes of all values."""
    return sum(prod(shape) * dtype.itemsize for dtype, shape in source.tensors.values())


def file_count(source: Source, num_files: int | None) -> int:
    """How many files are meant.

    Args:
        source: The values.
        num_files: How many; None: one for each GiB.

    Raises:
        ValueError: If it is not positive, or more than anybody needs.
    """
    if num_files is not None and not 1 <= num_files <= MAX_FILES:
        raise ValueError(f"num_files={num_files} must be from 1 to {MAX_FILES:,}")
    return num_files or max(1, -(-total_bytes(source) // FILE_BYTES))


def write_checkpoint(
    folder: str | os.PathLike[str],
    source: Source,
    header: Header,
    *,
    num_files: int | None = None,
    progress: Progress = lambda num_bytes: None,
) -> Path:
    """Writes a checkpoint, of which nothing is to be seen before it is complete.

    Each tensor is divided along its first dim over all files, as `fully_shard` divides it over as many ranks. Some MiB
    are in memory at a time.

    Args:
        folder: Where checkpoints are kept; made if it is not there, and removed again if this fails.
        source: The values.
        header: All that is no tensor; the number of files takes the place of its world size.
        num_files: How many files; None: one for each GiB.
        progress: Is told of bytes that are written.

    Returns:
        The new checkpoint, `folder/step-<8 digits>`.

    Raises:
        ValueError: If num_files is not positive, or there is a checkpoint of that step already.
        OSError: If a file cannot be written.
    """
    folder, count = Path(folder), file_count(source, num_files)
    target = folder / steps.step_name(header.step)
    if target.exists():
        raise ValueError(f"{target} is there already; name another folder, or remove it")
    tensors = {
        name: StoredTensor(dtype=dtype, shape=shape, layout=_layout(shape, count))
        for name, (dtype, shape) in source.tensors.items()
    }
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    temporary = steps.prepare(folder, header.step)
    try:
        owners, written = Owners(tensors), {}
        for name, pieces in ((file_name(rank), owners.of_rank(rank)) for rank in range(count)):
            ordered = sorted(pieces, key=lambda piece: -tensors[piece.name].dtype.itemsize)
            if ordered:
                stored = [(piece, tensors[piece.name]) for piece in ordered]
                entries = {piece.key(tensor.shape): (tensor.dtype, piece.box.sizes) for piece, tensor in stored}
                values = (_rows(source, piece.name, piece.box, progress) for piece in ordered)
                written[name] = shard_file.write(temporary / name, entries, values, BLOCK_BYTES)
        header = replace(header, world_size=count)
        files.write_manifest(temporary, Manifest(header=header, tensors=tensors, files=written))
        return steps.publish(temporary, header.step)
    except BaseException:
        steps.discard(temporary)
        # Innermost first; one that another process put something into stays.
        with suppress(OSError):
            for each in made:
                filesystem.remove_folder(each)
        raise


def _layout(shape: tuple[int, ...], num_files: int) -> Layout:
    return Layout(mesh=(("files", num_files),), splits=(("files", 0),)) if shape else replicated(num_files)


def _rows(source: Source, name: str, box: Box, progress: Progress) -> Iterator[Tensor]:
    """Values of a part of a tensor, some rows at a time."""
    dtype, _ = source.tensors[name]
    num_rows = box.sizes[0] if box.sizes else 1
    step = max(1, SLAB_BYTES * num_rows // max(1, prod(box.sizes) * dtype.itemsize))
    for start in range(0, num_rows, step):
        values = source.read(name, box.rows(0, start, min(start + step, num_rows)) if box.sizes else box)
        yield values
        progress(values.nbytes)
