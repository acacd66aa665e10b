"""Predicts the most that a rank holds in a step, in closed form: states, gathered units, activations, temporaries."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from parallel.ledger.block_sizes import BatchShape, itemsizes
from parallel.ledger.ends_memory import INT64
from parallel.ledger.optimizer_memory import step_temporaries
from parallel.ledger.parts import ModelParts, num_reductions, num_shards
from parallel.ledger.pieces import Memory
from parallel.ledger.schedule_order import actions_of
from parallel.ledger.spans import Span, layers_of, spans_of
from parallel.ledger.states import predict_states
from parallel.ledger.stretches import Borrowed, Stretches
from parallel.ledger.unit_memory import UnitMemory
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
    allocate for themselves is not in it. `bound` says how exact that is.

    Args:
        parts: The rank's part of the model.
        batch: What the rank is given.
        coordinates: Place of the rank along `fsdp`, `loss`, `cp` and `tp`, from 0.
    """
    return _Step(parts, batch, coordinates).forecast()


class _Step:
    """One rank's step."""

    def __init__(self, parts: ModelParts, batch: BatchShape, coordinates: Mapping[str, int]) -> None:
        self.parts, self.batch, self.coordinates = parts, batch, coordinates
        self.memory = Memory()
        self.units = UnitMemory(parts, self.memory, coordinates["tp"])
        self.stretches = Stretches(parts, batch, coordinates)
        self.states = predict_states(parts, coordinates, batch.optimizer)
        self.layers, self.spans = layers_of(parts), spans_of(parts)

    def forecast(self) -> MemoryForecast:
        """Goes through the step."""
        rest = self._rest()
        self.memory.now = self.memory.peak = rest
        if TRAITS[self.parts.config.data_parallel].flattens:
            # Torch holds on to the last step's gradients until the next one starts.
            rest += self.states.after_backward.gradients
        after = None
        if self.parts.config.pp > 1:
            self._pipeline()
        else:
            after = self._micro_batches()
        self._optimizer()
        return MemoryForecast(rest=rest, after_forward=after, peak=self.memory.peak)

    def _rest(self) -> int:
        rest = self.states.rest.parameters + self.states.rest.optimizer_state
        if self.units.has_buckets:
            rest += self.states.after_backward.gradients
        return rest + self._tokens() * self.parts.config.cp + self._received()

    def _tokens(self) -> int:
        """The integers of a rank's parts of all micro-batches."""
        return self.batch.num_micro_batches * self.stretches.sizes.tokens * INT64 * (3 + self.batch.has_documents)

    def _received(self) -> int:
        """A pipeline receives each micro-batch's stream and gradient in memory of their own, which stays."""
        ends = sum((not span.is_first) + (not span.is_last) for span in self.spans)
        return 0 if self.parts.config.pp == 1 else ends * self.batch.num_micro_batches * self.stretches.sizes.stream

    def _micro_batches(self) -> int:
        """One after the other; returns what is held after the first forward."""
        (span,) = self.spans
        count = self.batch.num_micro_batches
        once, after = num_reductions(self.parts.config, count) == 1, 0
        for number in range(count):
            self.units.reduces = not once or number == count - 1
            self.units.in_backward = False
            self._forward(span)
            after = after or self.memory.now
            self.units.in_backward = True
            self._backward(span)
            self.units.end_backward()
            self.units.adds = self.units.adds or self.units.reduces or not self.units.by_unit
        return after

    def _forward(self, span: Span) -> None:
        memory, units, stretches = self.memory, self.units, self.stretches
        embed, *blocks, head, root = self.layers
        units.enter([unit for unit in root if unit in span.units])
        if span.is_first:
            units.enter(embed)
            memory.change(*stretches.embedding(keeps_gradient=True)[0])
            units.leave(embed)
        flags = stretches.sizes.flags
        memory.change(stretches.tables + flags)
        for index in span.blocks:
            units.enter(blocks[index])
            borrowed = self._borrowed(span, index)
            memory.change(*stretches.block(index, keeps_gradients=True, borrowed=borrowed)[0])
            units.leave(blocks[index])
        if span.is_last:
            units.enter(head)
            memory.change(*stretches.loss[0])
            units.leave(head)
        units.end_forward()
        memory.change(-self._gone_after_forward)

    def _borrowed(self, span: Span, index: int) -> Borrowed:
        """What comes from another stage lies where it was received."""
        return Borrowed(
            stream=index == span.blocks[0] and not span.is_first,
            gradient=index == span.blocks[-1] and not span.is_last,
        )

    @property
    def _gone_after_forward(self) -> int:
        """What blocks share and backward does without; a checkpoint holds what its block was given."""
        stretches = self.stretches
        if stretches.kept is not None:
            return 0
        tables = 0 if stretches.turns_back else stretches.tables
        # A ring keeps them for its own backward.
        return tables + (0 if stretches.sizes.method == "ring" else stretches.sizes.flags)

    def _backward(self, span: Span) -> None:
        memory, units, stretches = self.memory, self.units, self.stretches
        embed, *blocks, head, root = self.layers
        ahead = self.parts.config.sharding.backward_prefetch or 1
        started: set[int] = set()

        def prefetch(index: int) -> None:
            for each in range(index, index - ahead, -1):
                if each in span.blocks and each not in started:
                    started.add(each)
                    units.ahead(blocks[each])

        prefetch(span.blocks[-1])
        if span.is_last:
            units.done(head)
            memory.change(*stretches.loss[1])
        for index in reversed(span.blocks):
            units.enter(blocks[index])
            prefetch(index - 1)
            keeps, borrowed = units.keeps_gradients_of(blocks[index]), self._borrowed(span, index)
            memory.change(*stretches.block(index, keeps_gradients=keeps, borrowed=borrowed)[1])
            units.done(blocks[index])
        memory.change(self._gone_after_forward - stretches.tables - stretches.sizes.flags)
        if span.is_first:
            memory.change(*stretches.embedding(keeps_gradient=True)[1])
        units.done([*(embed if span.is_first else ()), *(unit for unit in root if unit in span.units)])

    def _pipeline(self) -> None:
        """The rank's actions in the order of the schedule."""
        memory, units, sizes = self.memory, self.units, self.stretches.sizes
        # Torch's schedules take the step in one piece.
        whole = self._tokens()
        memory.change(whole)
        units.reduces = False
        sent = 0
        for action in actions_of(self.parts.config, self.parts.pp_rank, self.batch.num_micro_batches):
            span = self.spans[action.lap]
            units.in_backward = action.kind == "backward"
            if action.kind == "forward":
                self._forward(span)
                continue
            self._backward(span)
            # A stage holds what it gave until its backward is over, and the gradient until it has sent it.
            memory.change(0 if span.is_last else -sizes.stream)
            memory.change(-sent)
            sent = 0 if span.is_first else sizes.stream
            if self.parts.config.schedule == "gpipe":
                memory.change(-sent)
                sent = 0
        for span in self.spans:
            units.sum_waiting(span.units)
        units.end_backward()
        memory.change(-whole - sent)

    def _optimizer(self) -> None:
        """What its step holds for a moment."""
        parts, batch = self.parts, self.batch
        stored = itemsizes(parts)[0]
        sizes = [
            (
                prod(own := each.split(parts.config.tp, self.coordinates["tp"])) // num_shards(parts.config) * stored,
                len(own) > 1,
            )
            for each in parts.parameters
            if each.trainable
        ]
        above = step_temporaries(batch.optimizer, batch.optimizer_kernels, decays=batch.decays, sizes=sizes)
        self.memory.change(0, above)
