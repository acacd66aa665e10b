"""Holds all of a checkpoint against its manifest."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from math import prod

from checkpoint.extents import READ_BYTES
from checkpoint.manifest import FILE_NAME, Manifest, digests_name
from checkpoint.reader import ShardReader
from checkpoint.reads import in_threads
from checkpoint.verified_file import VerifiedFile

MAX_LISTED = 40
"""Findings that a message lists."""


def verify(path: str | os.PathLike[str], progress: Callable[[int], None] = lambda num_bytes: None) -> Manifest:
    """Reads all of a checkpoint and checks every byte; needs no process group.

    Args:
        path: The folder of one step.
        progress: Is told of bytes that are checked.

    Returns:
        Its manifest.

    Raises:
        ValueError: If something is missing, damaged, or of another checkpoint; lists file, tensor and byte range.
        OSError: If a file cannot be read.
    """
    reader = ShardReader(path)
    problems = list(_problems(reader, progress))
    if problems:
        more = [f"... and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        raise ValueError("\n".join([*problems[:MAX_LISTED], *more]))
    return reader.manifest


def _problems(reader: ShardReader, progress: Callable[[int], None]) -> Iterator[str]:
    """Everything that is wrong with the files of a checkpoint whose manifest is sound."""
    files = reader.manifest.files
    expected = {*files, *map(digests_name, files)}
    for name in sorted(os.listdir(reader.path)):
        if name not in expected and (FILE_NAME.fullmatch(name) or name.endswith(".digests")):
            yield f"{reader.path / name} is not one of the manifest's files; it is of another checkpoint"
    missing = sum(tensor.num_bytes for tensor in reader.manifest.tensors.values())
    for name in files:
        rank = int(name.removeprefix("rank-").removesuffix(".safetensors"))
        pieces = reader.owners.of_rank(rank)
        missing -= sum(prod(piece.box.sizes) * reader.manifest.tensors[piece.name].dtype.itemsize for piece in pieces)
        try:
            file = reader.file(rank)
            for piece in pieces:
                reader.check_entry(file, piece)
        except ValueError as error:
            yield str(error)
            continue
        if len(file.header.tensors) != len(pieces):
            yield f"{file.path} holds {len(file.header.tensors)} tensors, but the manifest says {len(pieces)}"
        yield from _damage(file, progress)
    if missing:
        yield f"{reader.path}: the files that the manifest lists lack {missing} bytes of its tensors"


def _damage(file: VerifiedFile, progress: Callable[[int], None]) -> Iterator[str]:
    """The damaged stretches of a file."""
    step = max(READ_BYTES // file.block_bytes, 1) * file.block_bytes
    size = file.stored.num_bytes
    with file:
        stretches = [partial(file.damaged, start, min(start + step, size)) for start in range(0, size, step)]
        for start, damaged in zip(range(0, size, step), in_threads(stretches, size), strict=True):
            yield from damaged
            progress(min(step, size - start))
