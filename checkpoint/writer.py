"""Writes what was planned in steps that can run apart: snapshot, write, seal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import files, filesystem, shard_file
from checkpoint.manifest import BLOCK_BYTES, Manifest, StoredFile, file_name
from checkpoint.save_plan import SavePlan


def snapshot(saved: SavePlan, rooms: dict[str, Tensor]) -> SavePlan:
    """Copies what this rank writes to host memory, so that the state may change.

    Args:
        saved: From `plan`.
        rooms: Memory of the copies, pinned where values come from a GPU; made anew unless an earlier snapshot has
            left just such rooms there, which are over by now.

    Returns:
        The plan with the copies.
    """
    fit = all(key in rooms and _is_alike(rooms[key], values) for key, values in saved.parts.items())
    if not fit or len(rooms) > len(saved.parts):
        # Not beside the new ones.
        rooms.clear()
        rooms.update(_rooms(saved.parts))
    for key, values in saved.parts.items():
        rooms[key].copy_(values, non_blocking=values.is_cuda)
    if any(values.is_cuda for values in saved.parts.values()):
        torch.cuda.current_stream().synchronize()
    return replace(saved, parts=dict(rooms))


def _is_alike(room: Tensor, values: Tensor) -> bool:
    return room.shape == values.shape and room.dtype == values.dtype


def _rooms(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Memory for copies of some tensors, in one piece."""
    num_bytes = sum(_aligned(values.nbytes) for values in parts.values())
    on_gpu = any(values.is_cuda for values in parts.values())
    buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    rooms, at = {}, 0
    for key, values in parts.items():
        rooms[key] = buffer[at : at + values.nbytes].view(values.dtype).view(values.shape)
        at += _aligned(values.nbytes)
    return rooms


def write(folder: Path, saved: SavePlan, rank: int) -> dict[str, StoredFile]:
    """Writes this rank's file, if it has anything to write, and waits until the disk has it; touches no other rank.

    Args:
        folder: Exists; nothing in it is trusted by readers before it is sealed.
        saved: From `plan` or `snapshot`.
        rank: This rank.

    Returns:
        What the manifest says of the file.

    Raises:
        OSError: If it cannot be written.
    """
    written = {}
    if saved.parts:
        entries = {key: (values.dtype, tuple(values.shape)) for key, values in saved.parts.items()}
        name = file_name(rank)
        values = ((each,) for each in saved.parts.values())
        written[name] = shard_file.write(folder / name, entries, values, BLOCK_BYTES)
    filesystem.sync_folder(folder)
    return written


def seal(folder: Path, saved: SavePlan, written: Sequence[Mapping[str, StoredFile]]) -> None:
    """Adds the manifest, which makes a folder complete; one rank does this once all have written.

    Args:
        folder: Where they wrote.
        saved: From `plan` or `snapshot`.
        written: From `write`, of each rank.

    Raises:
        OSError: If it cannot be written.
    """
    found = {name: each for of_rank in written for name, each in of_rank.items()}
    files.write_manifest(folder, Manifest(header=saved.header, tensors=saved.tensors, files=found))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
