"""Writes Hugging Face folders from parameters of any layout, each rank putting its own slices where they belong."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from checkpoint import filesystem
from checkpoint.box_io import slabs
from checkpoint.boxes import whole
from checkpoint.canonical import MODEL_PREFIX, by_fqn
from checkpoint.hub.new_folder import Boxes, NewHubFolder
from checkpoint.hub.places import Places
from checkpoint.manifest import Header
from checkpoint.offline import SLAB_BYTES, Progress, Source
from checkpoint.owners import Owners
from checkpoint.ranks import Ranks
from checkpoint.save_plan import plan
from checkpoint.state import FlatState, Trained, canonical_parameters

DEFAULT_FILE_BYTES = 5_000_000_000


def save_hub(
    path: str | os.PathLike[str],
    trained: Trained,
    config: Mapping[str, Any],
    places: Places,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> Path:
    """Writes a folder that `transformers` loads; all ranks call this together.

    Every rank writes its slices straight to their places in the files, which all ranks must see; what several ranks
    hold is shared out among them. No rank holds more than a few MiB beside its parameters. The folder appears at once,
    when it is complete.

    Args:
        path: The new folder, the same on all ranks.
        trained: The model.
        config: What config.json says of the model.
        places: Where files keep each of the parameters.
        dtype: Type of the values in the files; None: as the parameters have them.
        max_file_bytes: Most bytes of values in one file, unless one tensor alone has more.

    Returns:
        The folder.

    Raises:
        ValueError: If there is something at that path, or a value is too large for the dtype.
        OSError: If a file cannot be written.
    """
    ranks, path, where = Ranks(), Path(path), f"export to {path}"
    header = Header(step=0, num_tokens=0, world_size=ranks.size)
    parameters = by_fqn(canonical_parameters(trained))
    saved = plan(FlatState(tensors=parameters, per_rank={}, header=header), ranks)
    dtypes = {fqn: dtype or stored.dtype for fqn, stored in saved.tensors.items()}
    shapes = {fqn: stored.shape for fqn, stored in saved.tensors.items()}
    folder = ranks.together(where, lambda: NewHubFolder.of(places, shapes, dtypes, max_file_bytes))

    def pieces() -> Boxes:
        for piece in Owners(saved.tensors).of_rank(ranks.rank):
            yield piece.name, piece.box, saved.parts[piece.key(shapes[piece.name])]

    temporary = ranks.on_coordinator(where, lambda: folder.create(path))
    try:
        ranks.together(where, lambda: folder.write(temporary, pieces()))
        ranks.on_coordinator(where, lambda: folder.publish(temporary, path, config))
    except BaseException:
        if ranks.is_coordinator:
            with suppress(OSError):
                filesystem.remove_tree(temporary)
        raise
    return path


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names what is written within where there is no room for it: of an open file the system tells no name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def convert_to_hub(
    path: str | os.PathLike[str],
    source: Source,
    config: Mapping[str, Any],
    places: Places,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    beside: Mapping[str, bytes] = MappingProxyType({}),
    progress: Progress = lambda num_bytes: None,
) -> Path:
    """Writes a folder that `transformers` loads from a checkpoint, of which a few MiB are in memory at a time.

    Args:
        path: The new folder.
        source: The checkpoint; what is no parameter of the model in it is left out.
        config: What config.json says of the model.
        places: Where files keep each of the parameters.
        dtype: Type of the values in the files; None: as the checkpoint has them.
        max_file_bytes: Most bytes of values in one file, unless one tensor alone has more.
        beside: Name -> content of other files that belong to the model, its tokenizer's for example.
        progress: Is told of bytes that were read.

    Returns:
        The folder.

    Raises:
        ValueError: If there is something at that path, a value is too large for the dtype, or the checkpoint is
            damaged.
        OSError: If a file cannot be read or written.
    """
    path = Path(path)
    found = {
        name.removeprefix(MODEL_PREFIX): each for name, each in source.tensors.items() if name.startswith(MODEL_PREFIX)
    }
    shapes = {fqn: shape for fqn, (_, shape) in found.items()}
    dtypes = {fqn: dtype or own for fqn, (own, _) in found.items()}
    folder = NewHubFolder.of(places, shapes, dtypes, max_file_bytes)

    def pieces() -> Boxes:
        for fqn in folder.places:
            own, shape = found[fqn]
            for box, slab in slabs(whole(shape), torch.empty(shape, dtype=own, device="meta"), SLAB_BYTES):
                yield fqn, box, source.read(f"{MODEL_PREFIX}{fqn}", box)
                progress(slab.nbytes)

    with _named(path):
        temporary = folder.create(path)
        try:
            folder.write(temporary, pieces())
            folder.publish(temporary, path, config, beside)
        except BaseException:
            with suppress(OSError):
                filesystem.remove_tree(temporary)
            raise
    return path
