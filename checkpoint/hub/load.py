"""Loads Hugging Face folders into parameters of any layout, each rank reading the bytes of its own slices."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint.box_io import Scratch, read_box, slabs
from checkpoint.canonical import by_fqn
from checkpoint.differences import Differences
from checkpoint.hub.folder import HubFolder, open_hub_folder
from checkpoint.hub.places import Part, Place, Places, file_shapes, parts_of
from checkpoint.placed import local_box
from checkpoint.ranks import Ranks
from checkpoint.state import Trained, canonical_parameters
from parallel.replicas import local_part

NUM_THREADS = 3
"""Two reads for the disk to work on while a third thread copies."""
SLAB_BYTES = 32 << 20
"""Values that one thread fills at a time."""


@dataclass(frozen=True, kw_only=True)
class HubNames:
    """Where files keep the parameters of a whole model.

    Attributes:
        places: Makes, of the names in a folder (None: in one to be written), the places that make up each parameter,
            by fqn; tied ones under every name.
        ignored: Whether files may hold a name that is no parameter.
        tied: Groups of fqns that are one parameter; files may hold it under any of them.
    """

    places: Callable[[frozenset[str] | None], Places]
    ignored: Callable[[str], bool]
    tied: Sequence[Sequence[str]] = ()


def load_hub(path: str | os.PathLike[str], trained: Trained, names: HubNames, *, cast: bool = False) -> int:
    """Fills parameters from a Hugging Face folder; all ranks call this together.

    Beyond the parameters a rank needs a few MiB of memory. Nothing is changed unless all of the folder fits; only a
    file that turns out to be unreadable half-way leaves parameters partly filled.

    Args:
        path: The folder, the same on all ranks.
        trained: The model, whose parameters have memory.
        names: Where files keep them.
        cast: Whether values may be converted to the parameters' dtypes.

    Returns:
        Bytes of values that this rank has read.

    Raises:
        ValueError: If the folder cannot be read or does not fit: every tensor that is missing, unexpected, of another
            shape or dtype is listed; or tied ones differ.
        OSError: If a file cannot be read.
    """
    ranks, where = Ranks(), f"load {path}"
    tensors = canonical_parameters(trained)
    parameters = by_fqn(tensors)
    # One rank reads the headers: ranks together would ask a file system for ranks x files of them.
    folder = ranks.on_coordinator(where, lambda: open_hub_folder(path))
    parts = ranks.together(where, lambda: HubPlan(folder, parameters, names, cast=cast).local_parts())
    num_bytes = ranks.together(where, lambda: read_parts(folder, parts))
    tensors.fill_held()
    return num_bytes


class HubPlan:
    """Where a folder that fits a model has each of its parameters."""

    def __init__(self, folder: HubFolder, parameters: Mapping[str, Tensor], names: HubNames, *, cast: bool) -> None:
        """Holds a folder against a model.

        Args:
            folder: The folder.
            parameters: fqn -> parameter in the model's shape, perhaps on meta; those that this rank has.
            names: Where files keep them.
            cast: Whether values may be converted to the parameters' dtypes.

        Raises:
            ValueError: If they do not fit; lists every difference.
            OSError: If a file cannot be read.
        """
        self.folder, self.parameters, self.names, self.cast = folder, parameters, names, cast
        self.places = dict(names.places(frozenset(folder.tensors)))
        expected = {place.name for several in self.places.values() for place in several}
        twins = [twin for group in names.tied for twin in self._settle(group)]
        differences = self._differences(expected)
        if differences:
            hint = "" if cast else " (values are converted with cast=True alone)"
            raise ValueError(f"{folder.path} does not fit the model{hint}; nothing was changed\n{differences}")
        for fqn, twin in twins:
            self._require_equal(fqn, twin)

    def local_parts(self) -> list[Part]:
        """What fills all that this rank holds."""
        return [part for fqn in self.parameters for part in self._parts(fqn, self.places[fqn])]

    def _settle(self, group: Sequence[str]) -> Iterator[tuple[str, Sequence[Place]]]:
        """Takes a tied parameter from wherever the folder has it; yields where it has it a second time."""
        first, *_ = group
        found = [
            self.places[fqn] for fqn in group if all(each.name in self.folder.tensors for each in self.places[fqn])
        ]
        source, *twins = found or [self.places[first]]
        for fqn in group:
            del self.places[fqn]
        self.places[first] = source
        for twin in twins:
            yield first, twin

    def _differences(self, expected: set[str]) -> str:
        needed = {place.name for several in self.places.values() for place in several}
        here = {fqn: self.places[fqn] for fqn in self.parameters}
        shapes = file_shapes(here, {fqn: tuple(each.shape) for fqn, each in self.parameters.items()})
        dtypes = {place.name: self.parameters[fqn].dtype for fqn, several in here.items() for place in several}
        found = {name: values for name, (_, values) in self.folder.tensors.items()}
        differences = Differences(
            missing=sorted(needed - found.keys()),
            unexpected=sorted(name for name in found.keys() - expected if not self.names.ignored(name)),
            shapes=[
                f"{name}: {list(found[name].shape)} in the folder, {list(shape)} in the model"
                for name, shape in shapes.items()
                if name in found and found[name].shape != shape
            ],
            dtypes=[
                f"{name}: {found[name].dtype} in the folder, {dtype} in the model"
                for name, dtype in dtypes.items()
                if name in found and not self._fits(found[name].dtype, dtype)
            ],
        )
        return differences.describe()

    def _fits(self, stored: torch.dtype, wanted: torch.dtype) -> bool:
        return stored == wanted or (self.cast and stored.is_floating_point and wanted.is_floating_point)

    def _parts(self, fqn: str, places: Sequence[Place]) -> Iterator[Part]:
        parameter = self.parameters[fqn]
        return parts_of(places, local_box(parameter), local_part(parameter))

    def _require_equal(self, fqn: str, twin: Sequence[Place]) -> None:
        """Compares two copies of a tied parameter in the folder, as far as this rank holds it."""
        if fqn not in self.parameters:
            return
        scratch, dtype = (Scratch(), Scratch()), self.parameters[fqn].dtype
        for one, other in zip(self._parts(fqn, self.places[fqn]), self._parts(fqn, twin), strict=True):
            for (box, slab), _ in zip(
                slabs(one.box, one.values, 1 << 20), slabs(other.box, other.values, 1 << 20), strict=True
            ):
                pair = [each.take(tuple(slab.shape), dtype, slab.device) for each in scratch]
                for name, room in zip((one.name, other.name), pair, strict=True):
                    _read_part(self.folder, Part(name, box, room), Scratch())
                if not torch.equal(*pair):
                    raise ValueError(
                        f"{self.folder.path}: {one.name} and {other.name} differ, but the config ties them; set "
                        "tie_word_embeddings to false, or remove the one that is not meant"
                    )


def read_parts(folder: HubFolder, parts: Sequence[Part]) -> int:
    """Fills parts in the order in which files have them.

    Args:
        folder: The folder.
        parts: From `HubPlan`.

    Returns:
        Bytes read.

    Raises:
        ValueError: If a file has changed since its header was read.
        OSError: If it cannot be read.
    """
    place = {name: (file, values.start) for name, (file, values) in folder.tensors.items()}
    pieces = [
        Part(part.name, box, slab)
        for part in sorted(parts, key=lambda part: place[part.name])
        if part.values.numel()
        for box, slab in slabs(part.box, part.values, SLAB_BYTES)
    ]
    own = threading.local()

    def read(piece: Part) -> int:
        if not hasattr(own, "scratch"):
            own.scratch = Scratch()
        return _read_part(folder, piece, own.scratch)

    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hub-import") as pool:
        futures = [pool.submit(read, piece) for piece in pieces]
        try:
            return sum(future.result() for future in futures)
        finally:
            for future in futures:
                future.cancel()


@torch.no_grad()
def _read_part(folder: HubFolder, part: Part, scratch: Scratch) -> int:
    name, values = folder.tensors[part.name]
    descriptor = folder.open(name)
    try:
        return read_box(descriptor, values, part.box, part.values, scratch)
    except ValueError as error:
        raise ValueError(f"{folder.path / name}: {part.name}: {error}") from error
    finally:
        os.close(descriptor)
