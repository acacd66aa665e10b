"""Follows a rank of a pipeline through the actions of its schedule."""

from collections.abc import Sequence

from parallel.ledger.parts import ModelParts
from parallel.ledger.schedule_order import Action, actions_of, runs_listed
from parallel.ledger.span_memory import SpanMemory
from parallel.ledger.spans import Span
from parallel.schedules import stage_ranks


class PipelineMemory:
    """One rank's stages.

    What a stage receives lies in memory that stays. Where the next stage is on the same rank, it takes what is handed
    on instead of that memory, as it does in the step after.
    """

    def __init__(self, parts: ModelParts, pieces: SpanMemory, spans: Sequence[Span], num_micro_batches: int) -> None:
        """Nothing has run.

        Args:
            parts: The rank's part of the model.
            pieces: What spans do to memory.
            spans: The rank's stages, in order.
            num_micro_batches: Micro-batches of a step.
        """
        self._pieces, self._spans, self._is_listed = pieces, spans, runs_listed(parts.config)
        self._actions = actions_of(parts.config, parts.pp_rank, num_micro_batches)
        self._frees_sent = parts.config.schedule == "gpipe"
        own = [index for index, rank in enumerate(stage_ranks(parts.config)) if rank == parts.pp_rank]
        self._takes = [index - 1 in own for index in own]
        self._hands_on = [index + 1 in own for index in own]
        self._sent = 0
        self._waiting: set[int] = set()

    @property
    def left_over(self) -> int:
        """Bytes of gradients that the last step has left on what stages were given; the next one frees them first."""
        left = [
            each
            for each in self._actions
            if each.kind == "inputs" and not (self._spans[each.lap].is_first or self._takes[each.lap])
        ]
        return len(left) * self._stream

    def run(self) -> None:
        """Takes the rank's actions one by one."""
        self._pieces.units.reduces = False
        memory = self._pieces.memory
        memory.change(-self.left_over)
        for action in self._actions:
            self._take(action)
        if not self._is_listed:
            for span in self._spans:
                self._sum(span)
        memory.change(-self._sent)

    @property
    def _stream(self) -> int:
        return self._pieces.stretches.sizes.stream

    def _take(self, action: Action) -> None:
        span, units = self._spans[action.lap], self._pieces.units
        if action.kind == "gather":
            units.gather_all(span.units)
            self._waiting.add(action.lap)
            return
        if action.kind == "reduce":
            self._sum(span)
            return
        if action.kind == "free":
            for unit in span.units:
                units.free(unit)
            return
        if action.lap in self._waiting:
            self._waiting.remove(action.lap)
            units.copy_all(span.units)
        units.in_backward = action.kind != "forward"
        self._run(action, span)

    def _run(self, action: Action, span: Span) -> None:
        pieces, lap = self._pieces, action.lap
        if action.kind == "forward":
            pieces.forward(span)
            if self._hands_on[lap]:
                pieces.memory.change(-self._stream)
            elif self._is_listed and not span.is_last:
                # All that is sent is waited for at the end of the step.
                self._sent += self._stream
        elif action.kind == "inputs" and not span.is_first:
            pieces.inputs(span)
            # Otherwise it stays on what the stage was given.
            pieces.memory.change(-self._stream * self._takes[lap])
        elif action.kind == "weights" and not span.is_first:
            pieces.weights(span)
        elif action.kind != "inputs":
            # Of a first stage all is left for the weights.
            pieces.backward(span)
            self._after_backward(lap, span)

    def _after_backward(self, lap: int, span: Span) -> None:
        """A rank holds what it has sent until it waits for that."""
        memory = self._pieces.memory
        if self._is_listed:
            if self._takes[lap]:
                memory.change(-self._stream)
            elif not span.is_first:
                self._sent += self._stream
            return
        # What the stage gave is sent long since, the gradient only when the next one is.
        memory.change(0 if span.is_last else -self._stream)
        memory.change(-self._sent)
        self._sent = 0 if span.is_first else self._stream
        if self._frees_sent:
            memory.change(-self._sent)
            self._sent = 0

    def _sum(self, span: Span) -> None:
        self._pieces.units.sum_waiting(span.units)
        if self._is_listed:
            self._pieces.units.end_backward()
