"""Loads models from folders of torch.distributed.checkpoint, and saves them as such.

A folder of torch's own format has its table of contents as a pickle, which can run code when it is read.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from checkpoint.canonical import by_fqn
from checkpoint.foreign.match import Keys, fit, turn
from checkpoint.ranks import Ranks
from checkpoint.state import Trained, canonical_parameters
from parallel.replicas import local_part


def load_dcp(
    path: str | os.PathLike[str], trained: Trained, keys: Keys, *, allow_pickle: bool = False, cast: bool = False
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

    Raises:
        ValueError: If the folder is not trusted, is none, or does not fit; lists every difference.
        OSError: If it cannot be read.
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
    with _one_process_is_meant():
        dcp.load(
            {names[fqn]: parameters[fqn] for fqn in names},
            storage_reader=reader,
            no_dist=not ranks.is_distributed,
        )
    for fqn in names:
        turn(parameters[fqn], keys[fqn].num_rotary_heads, ours=True)
    tensors.fill_held()


def save_dcp(path: str | os.PathLike[str], trained: Trained, keys: Keys) -> None:
    """Writes a folder of torch.distributed.checkpoint; all ranks call this together.

    Args:
        path: The new folder.
        trained: The model.
        keys: Names for its parameters, and how their rows lie.

    Raises:
        ValueError: If there is something at that path.
        OSError: If it cannot be written.
    """
    ranks = Ranks()
    ranks.on_coordinator(f"export to {path}", lambda: _refuse_existing(Path(path)))
    tensors = canonical_parameters(trained)
    parameters = by_fqn(tensors)
    turned: dict[str, Tensor] = {}
    for fqn, key in keys.items():
        values = parameters[fqn]
        if key.num_rotary_heads is not None:
            copy = torch.empty_like(values, requires_grad=False)
            local_part(copy).copy_(local_part(values))
            turn(copy, key.num_rotary_heads, ours=False)
            values = copy
        turned[key.name] = values
    with _one_process_is_meant():
        dcp.save(turned, checkpoint_id=path, no_dist=not ranks.is_distributed)


def _read_metadata(path: Path, reader: dcp.FileSystemReader) -> Metadata:
    if not (path / ".metadata").is_file():
        raise ValueError(f"{path} is no folder of torch.distributed.checkpoint: it holds no .metadata")
    return reader.read_metadata()


def _refuse_existing(path: Path) -> None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} is there already; name a new folder, or remove it")


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Silences torch's remark that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
