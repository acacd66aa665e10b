"""Loads models from files that torch.save wrote, executing nothing in them."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from checkpoint.canonical import by_fqn
from checkpoint.foreign.match import Keys, fit, turned
from checkpoint.placed import local_box
from checkpoint.ranks import Ranks
from checkpoint.state import Trained, canonical_parameters
from parallel.replicas import local_part


def load_torch_file(path: str | os.PathLike[str], trained: Trained, keys: Keys, *, cast: bool = False) -> None:
    """Fills parameters from a file that torch.save wrote, which is read with weights_only; ranks call this together.

    Args:
        path: A file that holds a mapping of names to tensors, or one under `model` or `state_dict`. It is mapped into
            memory, so that a rank reads its slices alone.
        trained: The model, whose parameters have memory.
        keys: Where the file keeps them.
        cast: Whether values may be converted to the parameters' dtypes.

    Raises:
        ValueError: If the file holds anything but tensors and plain values, or does not fit; lists every difference.
        OSError: If it cannot be read.
    """
    ranks, where = Ranks(), f"load {path}"
    tensors = canonical_parameters(trained)
    parameters = by_fqn(tensors)
    loaded = ranks.together(where, lambda: _load_file(path))
    found = {name: (each.dtype, tuple(each.shape)) for name, each in loaded.items()}
    names = ranks.together(where, lambda: fit(path, found, parameters, keys, cast))
    for fqn, name in names.items():
        values = parameters[fqn]
        box, whole = local_box(values), turned(loaded[name], keys[fqn].num_rotary_heads, ours=True)
        index = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        local_part(values).copy_(whole[index])
    tensors.fill_held()


def _load_file(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, ValueError):
        raise
    except RuntimeError as error:
        # Torch's advice is for whoever has the values at hand.
        raise ValueError(f"{path} cannot be read: it is no file of torch.save, or one of torch before 1.6") from error
    except Exception as error:
        raise ValueError(f"{path} cannot be read with weights_only: {str(error).splitlines()[0]}") from error
    for name in ("model", "state_dict"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
    if not isinstance(loaded, Mapping) or not all(isinstance(name, str) for name in loaded):
        raise ValueError(f"{path} holds no mapping of names to tensors")
    return {name: each for name, each in loaded.items() if isinstance(each, Tensor)}
