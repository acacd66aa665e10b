"""Matches the names and the order of rows of other toolkits with ours."""

import os
import re
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint.differences import Differences
from checkpoint.placed import local_box
from parallel.replicas import local_part

_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|module)\.")
"""What wrappers put into names, at any depth."""
_OPTIMIZER = ("optim.", "optimizer.")


class ForeignKey(Protocol):
    """Where others keep a parameter."""

    @property
    def name(self) -> str:
        """Its name there."""
        ...

    @property
    def num_rotary_heads(self) -> int | None:
        """Heads of whose rows they have the rotary pairs side by side; None: rows lie as ours."""
        ...


Keys = Mapping[str, ForeignKey]
"""Where others keep each parameter, by fqn; tied ones under their first name."""


def fit(
    path: str | os.PathLike[str],
    found: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Mapping[str, Tensor],
    keys: Keys,
    cast: bool,
) -> dict[str, str]:
    """The name of each parameter among those that were found, once all fit.

    Names may carry what wrappers add, and `model.` before all of them.

    Args:
        path: Where they were found, for messages.
        found: Name -> dtype and shape; what is neither weight nor bias, or state of an optimizer, may be there too.
        tensors: fqn -> parameter in the model's shape.
        keys: Where others keep each of them.
        cast: Whether values may be converted to the parameters' dtypes.

    Returns:
        fqn -> name.

    Raises:
        ValueError: If they do not fit; lists every difference.
    """
    plain = {_WRAPPERS.sub("", name): name for name in found if not name.startswith(_OPTIMIZER)}
    wanted = {fqn: key.name for fqn, key in keys.items()}
    prefix = "" if any(name in plain for name in wanted.values()) else "model."
    names = {fqn: plain.get(prefix + name) for fqn, name in wanted.items()}
    differences = Differences(missing=[wanted[fqn] for fqn, name in names.items() if name is None])
    used = {name for name in names.values() if name is not None}
    differences.unexpected.extend(
        name for name in plain.values() if name not in used and name.endswith((".weight", ".bias"))
    )
    for fqn, name in names.items():
        tensor = tensors[fqn]
        if name is not None:
            dtype, shape = found[name]
            if shape != tuple(tensor.shape):
                differences.shapes.append(f"{name}: {list(shape)} there, {list(tensor.shape)} in the model")
            if dtype != tensor.dtype and not (cast and dtype.is_floating_point and tensor.dtype.is_floating_point):
                differences.dtypes.append(f"{name}: {dtype} there, {tensor.dtype} in the model")
    described = differences.describe()
    if described:
        raise ValueError(f"{path} does not fit the model; nothing was changed\n{described}")
    return {fqn: name for fqn, name in names.items() if name is not None}


def turn(values: Tensor, num_heads: int | None, *, ours: bool) -> None:
    """Puts the rows of each head into another order, in place; ranks that share the tensor call this together.

    Args:
        values: A parameter; one whole copy of it is in memory meanwhile.
        num_heads: Its heads; None: nothing is done.
        ours: Into our order, from the one with the rotary pairs side by side; else back.
    """
    if num_heads is None:
        return
    whole = values.full_tensor() if isinstance(values, DTensor) else values
    ordered, box = turned(whole, num_heads, ours=ours), local_box(values)
    index = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    local_part(values).copy_(ordered[index])


def turned(whole: Tensor, num_heads: int | None, *, ours: bool) -> Tensor:
    """The rows of each head in another order: ours has the first components of all rotary pairs before the second ones.

    Args:
        whole: A whole parameter.
        num_heads: Its heads; None: it is returned as it is.
        ours: Into our order, from the one with the pairs side by side; else back.
    """
    if num_heads is None:
        return whole
    pairs = whole.unflatten(0, (num_heads, -1, 2) if ours else (num_heads, 2, -1))
    return pairs.transpose(1, 2).flatten(0, 2)
