"""Counts the collectives that a rank issues: kind, group, payload, dtype and when."""

import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.collective_ops import OPS, SILENT, WAIT, Kind, process_group_of, tensors_in, work_of
from parallel.mesh import Mesh

Phase = Literal["forward", "backward"]

# Tensors whose ops turn themselves into local ones and collectives, which come back to the counter.
# Private: the public functional collectives return it, and only by its type can its waiting be seen.
_WRAPPERS = (torch.distributed.tensor.DTensor, torch.distributed._functional_collectives.AsyncCollectiveTensor)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective that this rank issued.

    Attributes:
        kind: What it does.
        view: View of the mesh whose group it spans; `world` or `other` where none does.
        ranks: Global ranks of that group.
        payload_bytes: Bytes of its larger side: of the gathered tensor, or of the input to reduce.
        dtype: Type of the elements.
        phase: Whether it ran in forward or, called by autograd, in backward.
        start_s: When it was called, on the clock of `time.perf_counter`.
        end_s: When its result was there, as far as the host knows: on a GPU, when it was queued; None before that.
    """

    kind: Kind
    view: str
    ranks: tuple[int, ...]
    payload_bytes: int
    dtype: torch.dtype
    phase: Phase
    start_s: float
    end_s: float | None = None


class Span(NamedTuple):
    """A stretch of time, on the clock of `time.perf_counter`."""

    start_s: float
    end_s: float


class CollectiveCounter(TorchDispatchMode):
    """Records every collective of more than one rank while it is entered.

    Attributes:
        records: The collectives, in the order in which this rank issued them.
        waits: When Python waited for one; on a GPU that blocks a stream and hardly the host. What C++ waits for by
            itself, as DDP does at the end of backward, is not among them.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Starts with nothing counted.

        Args:
            mesh: The mesh whose views name the groups.
        """
        super().__init__()
        self.mesh = mesh
        self.records: list[Collective] = []
        self.waits: list[Span] = []
        # Records of collectives whose end shows only when they are waited for: by the memory of their results, or by
        # the identity of their handle, which is held so that Python knows it again.
        self._pending: dict[int, int] = {}
        self._handles: dict[int, tuple[dist.Work, int]] = {}
        self._untimed_waits: list[Callable[..., Any]] = []

    def __enter__(self) -> Self:
        """Starts to record."""
        untimed = dist.Work.wait
        self._untimed_waits.append(untimed)

        @functools.wraps(untimed)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            done = untimed(work, *args, **kwargs)
            self.waits.append(Span(start_s, time.perf_counter()))
            _, index = self._handles.pop(id(work), (None, None))
            if index is not None:
                self._ended(index)
            return done

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stops to record."""
        super().__exit__(*error)
        self._handles.clear()
        dist.Work.wait = self._untimed_waits.pop()  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets the op run and records it if it is a collective."""
        if any(issubclass(each, _WRAPPERS) for each in types):
            return NotImplemented
        name = func.name().split(".")[0] if isinstance(func, torch._ops.OpOverload) else ""
        if not name.startswith(("c10d::", "_c10d_functional::")) or name in SILENT:
            return func(*args, **(kwargs or {}))
        if name != WAIT and name not in OPS:
            raise NotImplementedError(f"the collective counter does not know {name}; add it to its table")
        start_s = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if name == WAIT:
            self._waited(args[0], start_s)
        else:
            self._record(name, args, result, start_s)
        return result

    def _record(self, name: str, args: tuple[Any, ...], result: Any, start_s: float) -> None:
        kind, position = OPS[name]
        payload = list(tensors_in(result if position is None else args[position]))
        group = next(filter(None, map(process_group_of, args)))
        if group.size() == 1:
            return
        ranks = dist.get_process_group_ranks(group)
        record = Collective(
            kind=kind,
            view=self.mesh.view_of(ranks),
            ranks=tuple(ranks),
            payload_bytes=sum(tensor.numel() * tensor.element_size() for tensor in payload),
            dtype=payload[0].dtype,
            phase="backward" if _in_backward() else "forward",
            start_s=start_s,
        )
        index = len(self.records)
        self.records.append(record)
        work = work_of(result)
        if work is None:
            self._pending.update((tensor.data_ptr(), index) for tensor in tensors_in(result))
            return
        try:
            # Called by a thread of the backend, unless it is done already.
            work.get_future().add_done_callback(lambda _: self._ended(index))
        except RuntimeError:  # gloo's reduce-scatters, sends and receives have none
            self._handles[id(work)] = work, index

    def _waited(self, tensor: Tensor, start_s: float) -> None:
        self.waits.append(Span(start_s, time.perf_counter()))
        index = self._pending.pop(tensor.data_ptr(), None)
        if index is not None:
            self._ended(index)

    def _ended(self, index: int) -> None:
        self.records[index] = replace(self.records[index], end_s=time.perf_counter())

    def payload_bytes(self) -> Counter[tuple[Kind, str]]:
        """Payload in bytes by kind and view."""
        return self._sum(lambda each: each.payload_bytes)

    def counts(self) -> Counter[tuple[Kind, str]]:
        """Number of collectives by kind and view."""
        return self._sum(lambda each: 1)

    def _sum(self, amount: Callable[[Collective], int]) -> Counter[tuple[Kind, str]]:
        total: Counter[tuple[Kind, str]] = Counter()
        for each in self.records:
            total[each.kind, each.view] += amount(each)
        return total


def _in_backward() -> bool:
    # Private: no public call tells whether autograd is running; the counter's tests fail if this changes.
    return torch._C._current_graph_task_id() != -1
