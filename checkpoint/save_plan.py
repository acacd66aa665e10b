"""Finds who writes what of a state, by arithmetic on what ranks hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from checkpoint import strict_json
from checkpoint.layout import Layout, stacked
from checkpoint.manifest import Header
from checkpoint.owners import Owners, StoredTensor
from checkpoint.placed import layout_of, part_of_job
from checkpoint.ranks import Ranks
from checkpoint.state import FlatState
from checkpoint.strict_json import Json
from parallel.replicas import local_parts


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """What one rank writes, and what is written in all.

    Attributes:
        header: All that is no tensor.
        tensors: Every tensor of the checkpoint by name.
        digest: A hash of `tensors`.
        parts: Key in this rank's file -> its values, in their order there; they share the state's memory until
            `snapshot` copies them.
    """

    header: Header
    tensors: Mapping[str, StoredTensor]
    digest: str
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
    planned, alike = ranks.alike(what, lambda: plan_alone(flat, ranks), lambda own: own.digest)
    if alike:
        return planned
    described = ranks.distinct(planned.tensors, planned.digest)

    def merged() -> SavePlan:
        return _planned(flat, _merge(described, ranks.size), ranks.rank)

    return ranks.together(what, merged)


def plan_alone(flat: FlatState, ranks: Ranks) -> SavePlan:
    """What this rank writes if all ranks describe the state as this one does; asks none of them.

    Args:
        flat: The state.
        ranks: The ranks of the job.

    Raises:
        ValueError: If a tensor is held in a way that cannot be saved.
    """
    return _planned(flat, _describe(_Held.of(flat, ranks.size)), ranks.rank)


def _planned(flat: FlatState, described: "_Described", rank: int) -> SavePlan:
    parts = _parts(flat, described, rank)
    return SavePlan(header=flat.header, tensors=described.tensors, digest=described.digest, parts=parts)


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


@dataclass(frozen=True)
class _Held:
    """How a rank holds tensors: quick to find and to compare, so that a run's next save need not describe them again.

    Attributes:
        world_size: Ranks of the job.
        tensors: Name, dtype, shape and, of a DTensor, mesh and placements of each. This does not keep a mesh alive, nor
            the process groups that hang on it.
        per_rank: Name, dtype and shape of each row.
    """

    world_size: int
    tensors: tuple[tuple[str, torch.dtype, torch.Size, ReferenceType[DeviceMesh] | None, tuple[Placement, ...]], ...]
    per_rank: tuple[tuple[str, torch.dtype, torch.Size], ...]

    def __hash__(self) -> int:
        """As quick."""
        return hash((self.world_size, len(self.tensors)))

    @classmethod
    def of(cls, flat: FlatState, world_size: int) -> Self:
        tensors = (
            (name, each.dtype, each.shape, ref(each.device_mesh), each.placements)
            if isinstance(each, DTensor)
            else (name, each.dtype, each.shape, None, ())
            for name, each in flat.tensors.items()
        )
        rows = ((name, row.dtype, row.shape) for name, row in flat.per_rank.items())
        return cls(world_size, tuple(tensors), tuple(rows))


@lru_cache(maxsize=1)
def _describe(held: _Held) -> _Described:
    described: dict[str, StoredTensor] = {}
    # Most tensors share one of a few layouts, and asking a mesh for its ranks takes longer than all else here.
    layouts: dict[object, Layout] = {}
    for name, dtype, shape, of_mesh, placements in held.tensors:
        mesh = None if of_mesh is None else of_mesh()
        placed = id(mesh), placements
        if placed not in layouts:
            try:
                layouts[placed] = layout_of(mesh, placements, held.world_size)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        described[name] = StoredTensor(dtype=dtype, shape=tuple(shape), layout=layouts[placed])
    for name, dtype, shape in held.per_rank:
        layout = stacked(held.world_size)
        described[name] = StoredTensor(dtype=dtype, shape=(held.world_size, *shape), layout=layout)
    return _Described.of(described)


def _digest(described: Mapping[str, StoredTensor]) -> str:
    """A hash that is equal where ranks describe the same."""
    # Tensors share a few layouts, whose text is far longer than a number.
    layouts = {layout: number for number, layout in enumerate({each.layout: None for each in described.values()})}
    tensors: dict[str, Json] = {
        name: f"{each.dtype} {each.shape} {layouts[each.layout]}" for name, each in described.items()
    }
    return strict_json.digest([[repr(layout) for layout in layouts], tensors])


def _merge(described: Mapping[tuple[int, ...], Mapping[str, StoredTensor]], world_size: int) -> _Described:
    """One description of each tensor out of those of ranks that hold different ones."""
    holders: dict[str, list[int]] = {}
    tensors: dict[str, StoredTensor] = {}
    for ranks, of_ranks in described.items():
        for name, tensor in of_ranks.items():
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


@dataclass(frozen=True)
class _Part:
    """What a rank writes of a tensor.

    Attributes:
        key: Its name in the rank's file.
        name: The tensor.
        held: Sizes of what the rank holds of it.
        cuts: Dim, offset and size of each cut from there to what it writes.
    """

    key: str
    name: str
    held: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=2)
def _parts_of_rank(described: _Described, rank: int) -> tuple[_Part, ...]:
    """What a rank writes; a run saves the same parts again and again, of its own description and of the merged one."""
    parts = []
    for piece in Owners(described.tensors).of_rank(rank):
        tensor = described.tensors[piece.name]
        layout = tensor.layout
        held = layout.box(tensor.shape, {axis: layout.coordinate(rank, axis) for axis, _ in layout.splits})
        inner = piece.box.within(held)
        dims = zip(range(len(held.sizes)), inner.offsets, inner.sizes, strict=True)
        cuts = () if piece.box == held else tuple(dims)
        parts.append(_Part(piece.key(tensor.shape), piece.name, held.sizes, cuts))
    return tuple(parts)


def _parts(flat: FlatState, described: _Described, rank: int) -> dict[str, Tensor]:
    """The values that a rank writes by key in its file."""
    parts = _parts_of_rank(described, rank)
    rows = {name: row.unsqueeze(0) for name, row in flat.per_rank.items()}
    held = local_parts(rows[part.name] if part.name in rows else flat.tensors[part.name] for part in parts)
    found: dict[str, Tensor] = {}
    for part, values in zip(parts, held, strict=True):
        if values.shape != part.held:
            raise ValueError(f"{part.name} has {list(values.shape)} on rank {rank}, where its layout says {part.held}")
        for dim, offset, size in part.cuts:
            values = values.narrow(dim, offset, size)
        found[part.key] = values
    return found
