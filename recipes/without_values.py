"""Fills the gaps that torch's tensors without values leave in a training step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.collective_ops import tensors_in

# Tensors whose ops turn themselves into local ones, which come back to the mode.
# Private: only by its type can a functional collective's result be told from a plain tensor.
_WRAPPERS = (torch.distributed.tensor.DTensor, torch.distributed._functional_collectives.AsyncCollectiveTensor)
_INTEGERS = (torch.bool, torch.int32, torch.int64)


def modes_without_values() -> Callable[[], AbstractContextManager[None]]:
    """A context, to be entered as often as one likes, in which tensors have no values and take no memory."""
    # Private: torch documents it, but has no public name for it.
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def modes() -> Iterator[None]:
        # FSDP1 asks by address what is gathered, and whatever is fake answers 0.
        of_tensors = mock.patch.object(FakeTensor, "data_ptr", _address, create=True)
        with mock.patch.object(torch.UntypedStorage, "data_ptr", _address_of_storage), of_tensors, mode, FillGaps():
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


_data_ptr = torch.UntypedStorage.data_ptr


def _address_of_storage(storage: torch.UntypedStorage) -> int:
    """Of what has no values a number that tells it from others, as good as an address; 0 where nothing is allocated."""
    if storage.device.type != "meta":
        return _data_ptr(storage)
    return storage._cdata if storage.nbytes() else 0


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize
