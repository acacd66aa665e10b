"""Fills the gaps that torch's tensors without values leave in a training step."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import _flat_param
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.collective_ops import tensors_in
from parallel.parallelize import BACKENDS
from parallel.traits import TRAITS

# Tensors whose ops turn themselves into local ones, which come back to the mode.
# Private: only by its type can a functional collective's result be told from a plain tensor.
_WRAPPERS = (torch.distributed.tensor.DTensor, torch.distributed._functional_collectives.AsyncCollectiveTensor)
_INTEGERS = (torch.bool, torch.int32, torch.int64)


def modes_without_values() -> Callable[[], AbstractContextManager[None]]:
    """A context, to be entered as often as one likes, in which tensors have no values and take no memory."""
    # Private: torch documents it, but has no public name for it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def modes() -> Iterator[None]:
        flattening = next(BACKENDS[name] for name, traits in TRAITS.items() if traits.flattens)
        alone = mock.patch.object(flattening, "_sizes_on_ranks", _sizes_by_arithmetic)
        # Private: FSDP1 asks by address whether a unit is there, and a storage without memory has none.
        there = mock.patch.object(_flat_param, "_data_ptr_allocated", _flat_param._storage_size_allocated)
        with warnings.catch_warnings(), alone, there, mode, FillGaps():
            # Where a unit's weights lie is asked of fake tensors too, which all answer 0.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield

    return modes


class FillGaps(TorchDispatchMode):
    """Gives values to integers that a step reads, and shapes to products that torch knows in bfloat16 alone.

    How many rows come to an expert and which parameters DDP has seen are numbers that code reads: integers that are
    made from nothing, or from such integers, are real ones. They take next to no memory. What is computed from a tensor
    without values has none, integers too.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets the op run, with values where all that it is given has some."""
        # Private: torch documents fake tensors, but has no public name for them.
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        kwargs = kwargs or {}
        if any(issubclass(each, _WRAPPERS) for each in types):
            return NotImplemented
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_product(func, args, kwargs)
        given = list(tensors_in((args, tuple(kwargs.values()))))
        if any(isinstance(each, FakeTensor) for each in given):
            return func(*args, **kwargs)
        if not given:
            # The dtype of what is made from nothing may be a default, which depends on the arguments.
            made = func(*args, **kwargs)
            if not isinstance(made, Tensor) or made.dtype not in _INTEGERS:
                return made
        elif not all(each.dtype in _INTEGERS for each in given):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where there are values the kernels multiply other floats too."""
    factors: list[Tensor] = [each.to(torch.bfloat16) for each in args[:2]]
    return func(*factors, *args[2:], **kwargs).to(args[0].dtype)


def _sizes_by_arithmetic(backend: Any) -> Tensor:
    """What other ranks would say that they hold of each parameter, int64 [parameters, ranks]."""
    sizes: dict[str, Tensor] = {}
    ranks = torch.arange(backend._mesh.degree("fsdp"))
    for unit in backend._units:
        fqns = iter(unit.fqns)
        for flat in unit.params:
            first = ranks * flat.numel()
            start = end = 0
            # Private: FSDP1 has no public account of what it has flattened.
            for size, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
                start, end = end, end + size
                if not is_padding:
                    sizes[next(fqns)] = (first + flat.numel()).clamp(max=end) - first.clamp(min=start)
    return torch.stack([sizes[fqn] for fqn in backend._parameters]).clamp(min=0)
