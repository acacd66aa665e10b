"""Traces the bytes of all tensors that a rank holds while it computes, real or fake ones."""

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.collective_ops import tensors_in

# Tensors whose ops turn themselves into local ones, which come back to the meter.
# Private: only by its type can a functional collective's result be told from a plain tensor.
_WRAPPERS = (torch.distributed.tensor.DTensor, torch.distributed._functional_collectives.AsyncCollectiveTensor)
_COLLECTIVES = torch.ops._c10d_functional
_WAIT = _COLLECTIVES.wait_tensor.default


class MemoryMeter(TorchDispatchMode):
    """Follows every tensor that ops make while it is entered, until its memory is freed.

    What a kernel allocates for itself and frees before it returns shows in no tensor and is not counted.

    Attributes:
        live_bytes: Bytes of all of them now.
        peak_bytes: Most bytes at a time since `start`.
        num_ops: Ops since `start`.
        peak_op: Number of the op at which the peak was reached.
        log: Name of each op, and bytes after it. None: they are not recorded.
    """

    def __init__(self, device: torch.device) -> None:
        """Has seen nothing yet.

        Args:
            device: Tensors count that lie on a device of this type, or claim to.
        """
        super().__init__()
        self.live_bytes = self.peak_bytes = self.num_ops = self.peak_op = 0
        self.log: list[tuple[str, int]] | None = None
        self._device_type = device.type
        self._sizes: dict[int, int] = {}
        self._at_op: tuple[int, Callable[[], None]] | None = None

    def start(self, *, at_op: int | None = None, call: Callable[[], None] = lambda: None) -> None:
        """Forgets the peak so far and counts ops from here.

        Args:
            at_op: Number of an op to come. None: none of them.
            call: What is called right after it.
        """
        self.peak_bytes, self.num_ops, self.peak_op = self.live_bytes, 0, 0
        self._at_op = None if at_op is None else (at_op, call)

    def __enter__(self) -> Self:
        """Starts to follow."""
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._update(storage)
            return result

        # `fully_shard` frees gathered parameters by it and makes them again, which is no op.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stops to follow."""
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets the op run and takes note of what it made."""
        if any(issubclass(each, _WRAPPERS) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func is _WAIT:
            # It hands on its argument, which a fake tensor does not know.
            result = args[0]
        self.num_ops += 1
        for tensor in tensors_in(result):
            # A fake tensor claims a device, its storage lies on meta. A wrapper has no memory beside what it wraps.
            if tensor.device.type == self._device_type and not isinstance(tensor, _WRAPPERS):
                self._note(tensor.untyped_storage())
        if self.log is not None:
            self.log.append((str(func), self.live_bytes))
        if self._at_op is not None and self._at_op[0] == self.num_ops:
            self._at_op[1]()
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        # Private: a fake storage has no address, and Python may make a storage's object anew; test_trace fails if two
        # tensors of one storage count twice.
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self._update(storage)

    def _update(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            return
        self.live_bytes += storage.nbytes() - self._sizes[key]
        self._sizes[key] = storage.nbytes()
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_op = self.live_bytes, self.num_ops

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)
