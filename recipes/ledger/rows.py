"""Sets what was predicted beside what was traced, line by line, each with how close they are to be."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from parallel.ledger.exactness import promised_share
from parallel.ledger.live import LiveBytes
from parallel.ledger.states import Moments
from parallel.ledger.term import counted_traffic, traffic
from recipes.ledger.forecast import Forecast
from recipes.ledger.traced import TracedStep


@dataclass(frozen=True, kw_only=True)
class Line:
    """One quantity of one rank.

    Attributes:
        what: Its name.
        predicted: Bytes that were predicted; None: they were not.
        traced: Bytes that were traced.
        promise: Largest difference as a share of what was traced; 0: equal to the byte.
    """

    what: str
    predicted: int | None
    traced: int
    promise: float

    @property
    def residual(self) -> int | None:
        """Traced less predicted."""
        return None if self.predicted is None else self.traced - self.predicted

    @property
    def holds(self) -> bool:
        """Whether the promise holds."""
        return self.residual is None or abs(self.residual) <= self.promise * self.traced


def lines(predicted: Forecast, traced: TracedStep) -> tuple[Line, ...]:
    """All lines of one rank.

    Args:
        predicted: What was predicted.
        traced: What was traced.
    """
    return (*_states(predicted, traced), *_memory(predicted, traced), *_traffic(predicted, traced))


def _states(predicted: Forecast, traced: TracedStep) -> Iterator[Line]:
    for moment in dataclasses.fields(Moments):
        if moment.name == "after_forward" and traced.after_forward_bytes is None:
            continue
        for kind in dataclasses.fields(LiveBytes):
            values = [getattr(getattr(each.states, moment.name), kind.name) for each in (predicted, traced)]
            if any(values):
                what = f"{kind.name.replace('_', ' ')}, {moment.name.replace('_', ' ')}"
                yield Line(what=what, predicted=values[0], traced=values[1], promise=0.0)


def _memory(predicted: Forecast, traced: TracedStep) -> Iterator[Line]:
    memory, promise = predicted.memory, promised_share(predicted.bounds)
    pairs = [("all tensors, rest", None if memory is None else memory.rest, traced.rest_bytes)]
    if traced.after_forward_bytes is not None:
        after = None if memory is None else memory.after_forward
        pairs.append(("all tensors, after forward", after, traced.after_forward_bytes))
    pairs.append(("all tensors, peak of the step", None if memory is None else memory.peak, traced.peak_bytes))
    for what, one, other in pairs:
        yield Line(what=what, predicted=one, traced=other, promise=promise)


def _traffic(predicted: Forecast, traced: TracedStep) -> Iterator[Line]:
    one, other = traffic(predicted.terms), counted_traffic(traced.collectives)
    for where in sorted(one.keys() | other.keys()):
        kind, view, phase = where
        what = f"{kind.replace('_', '-')} over {view}, {phase}"
        yield Line(what=what, predicted=one[where], traced=other[where], promise=0.0)
