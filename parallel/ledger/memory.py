"""Predicts the most that a rank holds in a step, in closed form: states, gathered units, activations, temporaries."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from parallel.ledger.block_sizes import BatchShape, itemsizes
from parallel.ledger.ends_memory import INT64
from parallel.ledger.exactness import PROMISE, Bound
from parallel.ledger.lookup import kinds_of
from parallel.ledger.optimizer_memory import step_temporaries
from parallel.ledger.parts import ModelParts, UnitSpec, num_reductions, num_shards
from parallel.ledger.pipeline_memory import PipelineMemory
from parallel.ledger.span_memory import SpanMemory
from parallel.ledger.spans import spans_of
from parallel.ledger.states import dropped_gradients, flat_gradients, predict_states
from parallel.traits import TRAITS


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """What a rank is to hold, in bytes, temporaries included.

    Attributes:
        rest: Between steps, gradients freed; the tokens of the step are there.
        after_forward: At the end of the first micro-batch's forward; None with a pipeline.
        peak: Most of the whole step: forward, backward, clipping and the optimizer.
    """

    rest: int
    after_forward: int | None
    peak: int


def predict_memory(parts: ModelParts, batch: BatchShape, coordinates: Mapping[str, int]) -> MemoryForecast:
    """What one rank holds at rest, after forward and at the peak of a step of a dense model.

    It follows the step as it runs on a CPU with torch's own order of operations, tensor by tensor; what kernels
    allocate for themselves is not in it. `exactness.bounds_of` says how exact that is.

    Args:
        parts: The rank's part of the model.
        batch: What the rank is given.
        coordinates: Place of the rank along `fsdp`, `loss`, `cp` and `tp`, from 0.
    """
    return _Step(parts, batch, coordinates).forecast()


def routing_bounds(parts: ModelParts, batch: BatchShape, coordinates: Mapping[str, int]) -> tuple[Bound, ...]:
    """How far off the peak is at most where routers load experts unevenly; nothing where it makes no difference.

    The rows of a rank's own tokens are as many whatever their experts. Of those that come from others a rank gets none
    at least, and at most one for each of a token's experts that it may hold.

    Args:
        parts: The rank's part of the model.
        batch: What the rank is given.
        coordinates: Place of the rank along `fsdp`, `loss`, `cp` and `tp`, from 0.
    """
    config, shape = parts.config, parts.whole.shape
    if not shape.num_experts or config.ep == 1:
        return ()
    tokens = batch.micro_batch * batch.sequence_length // config.cp
    most = config.ep * tokens * min(shape.num_experts_per_token, shape.num_experts // config.ep)
    none, even, all_ = (
        predict_memory(parts, replace(batch, expert_rows=rows), coordinates).peak for rows in (0, None, most)
    )
    uneven = Bound(
        term="uneven loads of experts",
        share=max((all_ - even) / all_, (even - none) / none) + PROMISE,
        reason=f"routers choose: with all tokens that can come here the peak is {all_:,} bytes, with none {none:,}",
        in_trace=False,
    )
    return (uneven,)


class _Step:
    """One rank's step."""

    def __init__(self, parts: ModelParts, batch: BatchShape, coordinates: Mapping[str, int]) -> None:
        self.parts, self.batch, self.coordinates = parts, batch, coordinates
        self.pieces = SpanMemory(parts, batch, coordinates)
        self.memory, self.units, self.sizes = self.pieces.memory, self.pieces.units, self.pieces.stretches.sizes
        self.states = predict_states(parts, coordinates, batch.optimizer)
        self.spans = spans_of(parts)
        self.pipeline: PipelineMemory | None = None
        if parts.config.pp > 1:
            self.pipeline = PipelineMemory(parts, self.pieces, self.spans, batch.num_micro_batches)

    def forecast(self) -> MemoryForecast:
        """Goes through the step."""
        rest = self._rest()
        self.memory.now = self.memory.peak = rest
        if TRAITS[self.parts.config.data_parallel].flattens:
            # Torch holds on to the last step's gradients until the next one starts.
            rest += flat_gradients(self.parts, self.coordinates)
        after = None
        if self.pipeline is None:
            after = self._micro_batches()
        else:
            # Torch's schedules take the step in one piece.
            whole = self._tokens()
            self.memory.change(whole)
            self.pipeline.run()
            self.units.end_backward()
            self.memory.change(-whole)
        self._optimizer()
        return MemoryForecast(rest=rest, after_forward=after, peak=self.memory.peak)

    def _rest(self) -> int:
        rest = self.states.rest.parameters + self.states.rest.optimizer_state
        if self.units.has_buckets:
            rest += self.states.after_backward.gradients
        left = self._sent() if self.pipeline is None else self.pipeline.left_over
        return rest + self._tokens() * self.parts.config.cp + self._received() + left

    def _sent(self) -> int:
        """Buckets that came back from sums in another dtype; torch keeps what a hook gave until the next step's."""
        reduce, own = self.parts.config.precision.reduce_dtype, self.parts.parameters
        if not self.units.has_buckets or reduce is None:
            return 0
        tp, tp_rank = self.parts.config.tp, self.coordinates["tp"]
        sent = [each for each in own if each.trainable and each.dtype != reduce]
        return sum(prod(each.split(tp, tp_rank)) * each.dtype.itemsize for each in sent)

    def _tokens(self) -> int:
        """The integers of a rank's parts of all micro-batches."""
        return self.batch.num_micro_batches * self.sizes.tokens * INT64 * (3 + self.batch.has_documents)

    def _received(self) -> int:
        """A pipeline receives each micro-batch's stream and gradient in memory of their own, which stays."""
        ends = sum((not span.is_first) + (not span.is_last) for span in self.spans)
        return 0 if self.parts.config.pp == 1 else ends * self.batch.num_micro_batches * self.sizes.stream

    def _micro_batches(self) -> int:
        """One after the other; returns what is held after the first forward."""
        (span,) = self.spans
        count, units = self.batch.num_micro_batches, self.units
        once, after = num_reductions(self.parts.config, count) == 1, 0
        dropped = dropped_gradients(self.parts, self.coordinates)
        # Those in the middle hold what the second does, and where each is summed the last one too.
        alike = range(2, count - 1 if once else count)
        for number in (each for each in range(count) if each not in alike):
            units.reduces = not once or number == count - 1
            units.in_backward = False
            self.pieces.forward(span)
            after = after or self.memory.now
            units.in_backward = True
            self.memory.change(-dropped * units.adds)
            self.pieces.backward(span)
            self.pieces.copies.end_backward(adds=units.adds, goes=units.has_buckets and units.reduces)
            units.end_backward()
            units.adds = units.adds or units.reduces or not units.by_unit
        return after

    def _updated(self, unit: UnitSpec) -> list[tuple[int, bool]]:
        """Bytes that the rank updates of each parameter of a unit, and whether it is a matrix."""
        config, stored = self.parts.config, itemsizes(self.parts)[0]
        own = [each.split(config.tp, self.coordinates["tp"]) for each in unit.parameters if each.trainable]
        return [(prod(shape) // num_shards(config) * stored, len(shape) > 1) for shape in own]

    def _optimizer(self) -> None:
        """What its step holds for a moment."""
        parts, batch = self.parts, self.batch
        known = {id(unit.kind): self._updated(unit) for unit, _ in kinds_of(parts)}
        sizes = [size for unit in parts.units for size in known[id(unit.kind)]]
        above = step_temporaries(batch.optimizer, batch.optimizer_kernels, decays=batch.decays, sizes=sizes)
        self.memory.change(0, above)
