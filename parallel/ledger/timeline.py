"""Records when the parts of a step run, when its collectives are under way, and when the rank waits for them."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.hooks import RemovableHandle

from parallel.counter import Collective, CollectiveCounter, Span
from parallel.ledger.parts import is_unit_based
from parallel.trained import Trained


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of one rank, on the clock of `time.perf_counter`.

    Attributes:
        step: From its start to its end.
        parts: Stretches of it by name, such as `forward` and `backward`, in order.
        collectives: What it sent.
        waits: When it waited for them, without overlaps.
    """

    step: Span
    parts: tuple[tuple[str, Span], ...]
    collectives: tuple[Collective, ...]
    waits: tuple[Span, ...]

    @property
    def waiting_share(self) -> float:
        """Share of the step that the rank spent waiting for collectives."""
        waited_s = sum(span.end_s - span.start_s for span in self.waits)
        return waited_s / (self.step.end_s - self.step.start_s)


class StepRecorder:
    """Records a step while it is entered; the recording itself takes some microseconds a collective."""

    def __init__(self, trained: Trained) -> None:
        """Records nothing yet.

        Args:
            trained: What takes the step.
        """
        self._trained, self._counter = trained, CollectiveCounter(trained.mesh)
        self._parts: list[tuple[str, Span]] = []
        self._hooks: list[RemovableHandle] = []
        self._forward_s = self._start_s = self._end_s = 0.0

    def __enter__(self) -> "StepRecorder":
        """Starts to record."""
        trained = self._trained
        self._hooks = [
            trained.model.register_forward_pre_hook(lambda *_: self._forward_starts()),
            trained.model.register_forward_hook(lambda *_: self._ends("forward", self._forward_s)),
        ]
        self._run_micro_batch = trained.backend.run_micro_batch
        trained.backend.run_micro_batch = self._timed(self._run_micro_batch)  # type: ignore[method-assign]
        self._start_s = time.perf_counter()
        self._counter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stops to record."""
        self._counter.__exit__(*error)
        self._end_s = time.perf_counter()
        self._trained.backend.run_micro_batch = self._run_micro_batch  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Names what runs within.

        Args:
            name: Of this part of the step.
        """
        start_s = time.perf_counter()
        yield
        self._ends(name, start_s)

    def timeline(self) -> Timeline:
        """What was recorded, once the step is over."""
        waits = [*self._counter.waits, *self._waits_of_ddp()]
        return Timeline(
            step=Span(self._start_s, self._end_s),
            parts=tuple(self._parts),
            collectives=tuple(self._counter.records),
            waits=tuple(_merged(waits)),
        )

    def _timed(self, run_micro_batch: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            run_micro_batch(*args, **kwargs)
            forward = next(span for name, span in reversed(self._parts) if name == "forward")
            self._ends("backward", forward.end_s)

        return timed

    def _forward_starts(self) -> None:
        self._forward_s = time.perf_counter()

    def _ends(self, name: str, start_s: float) -> None:
        self._parts.append((name, Span(start_s, time.perf_counter())))

    def _waits_of_ddp(self) -> Iterator[Span]:
        """DDP sends its last bucket when the last gradient is there, and then has nothing to do but wait for all."""
        if is_unit_based(self._trained.config):
            return
        for name, backward in self._parts:
            inside = [
                each
                for each in self._counter.records
                if each.phase == "backward" and backward.start_s <= each.start_s <= backward.end_s
            ]
            if name == "backward" and inside:
                end_s = max(each.end_s or each.start_s for each in inside)
                yield Span(inside[-1].start_s, min(end_s, backward.end_s))


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The same stretches of time without overlaps."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start_s <= merged[-1].end_s:
            merged[-1] = Span(merged[-1].start_s, max(merged[-1].end_s, span.end_s))
        else:
            merged.append(span)
    return merged
