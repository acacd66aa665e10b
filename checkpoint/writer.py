"""Saves a flat state in steps that can run apart: plan, snapshot, write, seal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint import files, filesystem, shard_file, strict_json
from checkpoint.layout import Layout, stacked
from checkpoint.manifest import BLOCK_BYTES, Header, Manifest, StoredFile, file_name
from checkpoint.owners import Owners, Piece, StoredTensor
from checkpoint.placed import LocalBoxes, layout_of, part_of_job
from checkpoint.ranks import Ranks
from checkpoint.state import FlatState
from checkpoint.strict_json import Json
from parallel.replicas import local_part


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """What one rank writes, and what is written in all.

    Attributes:
        header: All that is no tensor.
        tensors: Every tensor of the checkpoint by name.
        parts: Key in this rank's file -> its values, in their order there; they share the state's memory until
            `snapshot` copies them.
    """

    header: Header
    tensors: Mapping[str, StoredTensor]
    parts: Mapping[str, Tensor]


def plan(flat: FlatState, ranks: Ranks) -> SavePlan:
    """Finds what this rank writes; all ranks call this together.

    No list of parts travels: ranks compare a digest of what they describe, send descriptions only where those differ,
    as between pipeline stages, and find by arithmetic who writes what.

    Args:
        flat: The state.
        ranks: The ranks of the job.

    Raises:
        ValueError: If a tensor is held in a way that cannot be saved, or ranks describe one name in two ways.
    """
    what = "describe the state"
    own = ranks.together(what, lambda: _Described.of(_describe(flat, ranks.size)))
    described = ranks.distinct(own, own.digest)
    # One description needs no merging, nor ranks that agree on how it went.
    all_of_it = own if len(described) == 1 else ranks.together(what, lambda: _merge(described, ranks.size))
    parts = ranks.together(what, lambda: _parts(flat, all_of_it, ranks.rank))
    return SavePlan(header=flat.header, tensors=all_of_it.tensors, parts=parts)


def snapshot(saved: SavePlan, buffer: Tensor | None = None) -> tuple[SavePlan, Tensor]:
    """Copies what this rank writes to host memory, so that the state may change.

    Args:
        saved: From `plan`.
        buffer: The one that an earlier snapshot returned; used again if it is large enough.

    Returns:
        The plan with copies, and the buffer that holds them, pinned where values come from a GPU.
    """
    num_bytes = sum(_aligned(values.nbytes) for values in saved.parts.values())
    on_gpu = any(values.is_cuda for values in saved.parts.values())
    if buffer is None or len(buffer) < num_bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    parts, at = {}, 0
    for key, values in saved.parts.items():
        room = buffer[at : at + values.nbytes].view(values.dtype).view(values.shape)
        parts[key] = room.copy_(values, non_blocking=on_gpu)
        at += _aligned(values.nbytes)
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return replace(saved, parts=parts), buffer


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


@dataclass(frozen=True)
class _Described:
    """What tensors a state has; equal where the digests are, so that what follows from it need not be found again.

    Attributes:
        digest: Of `tensors`.
        tensors: By name.
    """

    digest: str
    tensors: Mapping[str, StoredTensor] = field(compare=False, repr=False)

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor]) -> Self:
        return cls(_digest(tensors), tensors)


@lru_cache(maxsize=1)
def _pieces(described: _Described, rank: int) -> tuple[tuple[str, Piece], ...]:
    """What a rank writes, each part with its key in the rank's file; a run saves the same ones again and again."""
    pieces = Owners(described.tensors).of_rank(rank)
    return tuple((piece.key(described.tensors[piece.name].shape), piece) for piece in pieces)


def _describe(flat: FlatState, world_size: int) -> dict[str, StoredTensor]:
    described: dict[str, StoredTensor] = {}
    # Most tensors share one of a few layouts, and asking a mesh for its ranks takes longer than all else here.
    layouts: dict[object, Layout] = {}
    for name, tensor in flat.tensors.items():
        placed = (id(tensor.device_mesh), tensor.placements) if isinstance(tensor, DTensor) else None
        if placed not in layouts:
            try:
                layouts[placed] = layout_of(tensor, world_size)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        described[name] = StoredTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), layout=layouts[placed])
    for name, row in flat.per_rank.items():
        shape = (world_size, *row.shape)
        described[name] = StoredTensor(dtype=row.dtype, shape=shape, layout=stacked(world_size))
    return described


def _digest(described: Mapping[str, StoredTensor]) -> str:
    """A hash that is equal where ranks describe the same."""
    # Tensors share a few layouts, whose text is far longer than a number.
    layouts = {layout: number for number, layout in enumerate({each.layout: None for each in described.values()})}
    tensors: dict[str, Json] = {
        name: f"{each.dtype} {each.shape} {layouts[each.layout]}" for name, each in described.items()
    }
    return strict_json.digest([[repr(layout) for layout in layouts], tensors])


def _merge(described: Mapping[tuple[int, ...], _Described], world_size: int) -> _Described:
    """One description of each tensor out of those of ranks that hold different ones."""
    holders: dict[str, list[int]] = {}
    tensors: dict[str, StoredTensor] = {}
    for ranks, of_ranks in described.items():
        for name, tensor in of_ranks.tensors.items():
            holders.setdefault(name, []).extend(ranks)
            if tensors.setdefault(name, tensor) != tensor:
                raise ValueError(
                    f"{name} is {tensor} on the ranks {list(ranks)}, but {tensors[name]} on others; all ranks that "
                    "hold a tensor must hold it with one shape, dtype and layout"
                )
    placed = {}
    for name, tensor in tensors.items():
        try:
            placed[name] = replace(tensor, layout=part_of_job(tensor.layout, sorted(holders[name])))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return _Described.of(placed)


def _parts(flat: FlatState, described: _Described, rank: int) -> dict[str, Tensor]:
    """The values that a rank writes by key in its file."""
    parts: dict[str, Tensor] = {}
    boxes = LocalBoxes()
    for key, piece in _pieces(described, rank):
        if piece.name in flat.per_rank:
            parts[key] = flat.per_rank[piece.name].unsqueeze(0)
            continue
        tensor = flat.tensors[piece.name]
        held = boxes.of(tensor)
        values = local_part(tensor)
        if tuple(values.shape) != held.sizes:
            raise ValueError(
                f"{piece.name} has {list(values.shape)} on rank {rank}, where its layout says {held.sizes}"
            )
        if piece.box != held:
            for dim, (offset, size) in enumerate(zip(piece.box.within(held).offsets, piece.box.sizes, strict=True)):
                values = values.narrow(dim, offset, size)
        parts[key] = values
    return parts


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
