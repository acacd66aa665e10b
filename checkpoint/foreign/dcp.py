"""Loads models from folders of torch.distributed.checkpoint, and saves them as such.

A folder of torch's own format has its table of contents as a pickle, which can run code when it is read.
"""

import io
import os
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from checkpoint import filesystem
from checkpoint.canonical import by_fqn
from checkpoint.foreign.match import Keys, fit, turn
from checkpoint.offline import Progress
from checkpoint.ranks import Failure, Ranks
from checkpoint.state import Trained, canonical_parameters
from parallel.replicas import local_part


def load_dcp(
    path: str | os.PathLike[str],
    trained: Trained,
    keys: Keys,
    *,
    allow_pickle: bool = False,
    cast: bool = False,
    progress: Progress = lambda num_bytes: None,
) -> None:
    """Fills parameters from a folder of torch.distributed.checkpoint; all ranks call this together.

    Names may carry what wrappers add, and `model.` before all of them. Every rank reads its slices.

    Args:
        path: The folder.
        trained: The model, whose parameters have memory.
        keys: Where the folder keeps them.
        allow_pickle: Reading such a folder unpickles a file in it, which can run whatever its author wants: say that
            you trust it.
        cast: Whether values may be converted to the parameters' dtypes.
        progress: Is told of bytes that this rank has read.

    Raises:
        ValueError: If the folder is not trusted, is none, or does not fit; lists every difference.
        OSError: If it cannot be read, on any rank.
    """
    if not allow_pickle:
        raise ValueError(
            f"{path}: reading a folder of torch.distributed.checkpoint unpickles its .metadata, which can run any "
            "code; pass allow_pickle=True (--allow-pickle) if you trust whoever wrote it"
        )
    ranks, where, reader = Ranks(), f"load {path}", dcp.FileSystemReader(path)
    # Together, because a file system may not show the folder to all ranks.
    metadata = ranks.together(where, lambda: _read_metadata(Path(path), reader))
    tensors = canonical_parameters(trained)
    parameters = by_fqn(tensors)
    found = {
        name: (each.properties.dtype, tuple(each.size))
        for name, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    names = ranks.together(where, lambda: fit(path, found, parameters, keys, cast))
    with _as_one_process(), _own_errors(where, ranks):
        dcp.load(
            {names[fqn]: parameters[fqn] for fqn in names},
            storage_reader=reader,
            planner=_TellingLoad(progress),
            no_dist=not ranks.is_distributed,
        )
    for fqn in names:
        turn(parameters[fqn], keys[fqn].num_rotary_heads, ours=True)
    tensors.fill_held()


def save_dcp(
    path: str | os.PathLike[str], trained: Trained, keys: Keys, *, progress: Progress = lambda num_bytes: None
) -> None:
    """Writes a folder of torch.distributed.checkpoint, which appears once it is complete; all ranks call this together.

    Args:
        path: The new folder.
        trained: The model.
        keys: Names for its parameters, and how their rows lie.
        progress: Is told of bytes that this rank has handed to the disk.

    Raises:
        ValueError: If there is something at that path.
        OSError: If it cannot be written, on any rank; nothing of it is left.
    """
    ranks, path, where = Ranks(), Path(path).absolute(), f"export to {path}"
    temporary = ranks.on_coordinator(where, lambda: _prepare(path))
    try:
        tensors = canonical_parameters(trained)
        parameters = by_fqn(tensors)
        named = {key.name: _turned(parameters[fqn], key.num_rotary_heads) for fqn, key in keys.items()}
        with _as_one_process(), _own_errors(where, ranks):
            dcp.save(named, checkpoint_id=temporary, planner=_TellingSave(progress), no_dist=not ranks.is_distributed)
        ranks.on_coordinator(where, lambda: _publish(temporary, path))
    except BaseException:
        if ranks.is_coordinator:
            with suppress(OSError):
                filesystem.remove_tree(temporary)
        raise


def _turned(values: Tensor, num_rotary_heads: int | None) -> Tensor:
    """A parameter as others have its rows: itself, or a copy."""
    if num_rotary_heads is None:
        return values
    copy = torch.empty_like(values, requires_grad=False)
    local_part(copy).copy_(local_part(values))
    turn(copy, num_rotary_heads, ours=False)
    return copy


def _prepare(path: Path) -> Path:
    """A hidden folder beside the one to come."""
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise ValueError(f"{path} is there already; name a new folder, or remove it")
    filesystem.make_folders(path.parent)
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    filesystem.make_folder(temporary)
    return temporary


def _publish(temporary: Path, path: Path) -> None:
    """Gives a complete folder its name; torch has synced the files, but not their names."""
    filesystem.sync_folder(temporary)
    filesystem.rename(temporary, path)
    filesystem.sync_folder(path.parent)


class _TellingLoad(DefaultLoadPlanner):
    """Tells of each tensor that was read."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._progress(tensor.nbytes)


class _TellingSave(DefaultSavePlanner):
    """Tells of each tensor that is written."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        found = super().resolve_data(write_item)
        if isinstance(found, Tensor):
            self._progress(found.nbytes)
        return found


def _read_metadata(path: Path, reader: dcp.FileSystemReader) -> Metadata:
    if not (path / ".metadata").is_file():
        raise ValueError(f"{path} is no folder of torch.distributed.checkpoint: it holds no .metadata")
    return reader.read_metadata()


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Silences torch's remark that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


@contextmanager
def _own_errors(where: str, ranks: Ranks) -> Iterator[None]:
    """Raises what failed on some ranks as all else here does; torch's own error is no Exception."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise ranks.error(where, {rank: Failure.of(each[0]) for rank, each in error.failures.items()}) from error
