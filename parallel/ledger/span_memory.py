"""Follows what a rank runs in one piece, the model or a stage of a pipeline, forward and backward."""

from collections.abc import Mapping

from parallel.ledger.block_run import Borrowed
from parallel.ledger.block_sizes import BatchShape
from parallel.ledger.copied_memory import Copies
from parallel.ledger.parts import ModelParts
from parallel.ledger.pieces import Memory
from parallel.ledger.spans import Span, layers_of
from parallel.ledger.split_backward import SplitBackward
from parallel.ledger.stretches import Stretches
from parallel.ledger.unit_memory import UnitMemory


class SpanMemory:
    """What spans of one rank do to memory.

    Attributes:
        memory: What is held.
        units: Its sharding units.
        copies: Its parameters in the dtype of the computation, where no unit makes them.
        stretches: What parts of a span do.
    """

    def __init__(self, parts: ModelParts, batch: BatchShape, coordinates: Mapping[str, int]) -> None:
        """Holds nothing.

        Args:
            parts: The rank's part of the model.
            batch: What the rank is given.
            coordinates: Place of the rank along `fsdp`, `cp` and `tp`, from 0.
        """
        self._ahead = parts.config.sharding.backward_prefetch or 1
        self.memory = Memory()
        self.units = UnitMemory(parts, self.memory, coordinates)
        self.copies = Copies(parts, self.memory, coordinates["tp"])
        self.stretches = Stretches(parts, batch, coordinates)
        self._layers = layers_of(parts)

    def forward(self, span: Span) -> None:
        """A micro-batch's way through a span.

        Args:
            span: The span.
        """
        memory, units, stretches = self.memory, self.units, self.stretches
        embed, *blocks, head, root = self._layers
        units.enter([unit for unit in root if unit in span.units])
        self.copies.make()
        if span.is_first:
            units.enter(embed)
            memory.change(*stretches.embedding(keeps_gradient=True)[0])
            units.leave(embed)
        flags = stretches.sizes.flags
        memory.change(stretches.tables + flags)
        for index in span.blocks:
            units.enter(blocks[index])
            borrowed = _borrowed(span, index)
            copies = self.copies.made_by(index)
            memory.change(*stretches.block(index, keeps_gradients=True, borrowed=borrowed, own_copies=copies)[0])
            units.leave(blocks[index])
        if span.is_last:
            units.enter(head)
            memory.change(*stretches.loss[0])
            units.leave(head)
        self.copies.end_forward()
        units.end_forward()
        memory.change(-self._gone_after_forward)

    def backward(self, span: Span) -> None:
        """The gradients of a micro-batch, from what follows on a span to what is before it.

        Args:
            span: The span.
        """
        memory, units, stretches = self.memory, self.units, self.stretches
        embed, *blocks, head, root = self._layers
        started: set[int] = set()

        def prefetch(index: int) -> None:
            for each in range(index, index - self._ahead, -1):
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
            keeps, borrowed, copies = self._keeps_gradients(index), _borrowed(span, index), self.copies.made_by(index)
            memory.change(*stretches.block(index, keeps_gradients=keeps, borrowed=borrowed, own_copies=copies)[1])
            self.copies.end_block(index, adds=units.adds, goes=units.has_buckets and units.reduces)
            units.done(blocks[index])
        self._free_tables()
        if span.is_first:
            memory.change(*stretches.embedding(keeps_gradient=True)[1])
        units.done([*(embed if span.is_first else ()), *(unit for unit in root if unit in span.units)])

    def inputs(self, span: Span) -> None:
        """The gradient of what a span was given, without those of weights; the graph of forward stays.

        Args:
            span: The span.
        """
        passed = 0
        if span.is_last:
            self.memory.change(*self.stretches.split_loss.inputs)
            passed = self.stretches.split_loss.passed
        for index in reversed(span.blocks):
            part = self._split(span, index, keeps_gradients=True)
            self.memory.change(*part.inputs)
            passed += part.passed
        self.memory.change(-passed)

    def weights(self, span: Span) -> None:
        """The gradients of weights that were left then.

        Args:
            span: The span.
        """
        left, (*_, head, root) = 0, self._layers
        for index in span.blocks:
            part = self._split(span, index, keeps_gradients=self._keeps_gradients(index))
            self.memory.change(*part.weights)
            left += part.left
        if span.is_last:
            self.memory.change(*self.stretches.split_loss.weights)
        for index in span.blocks:
            self.units.done(self._layers[1 + index])
        self.units.done([*(head if span.is_last else ()), *(unit for unit in root if unit in span.units)])
        self.memory.change(-left)
        self._free_tables()

    def _split(self, span: Span, index: int, *, keeps_gradients: bool) -> SplitBackward:
        behind = range(index + 1, span.blocks.stop)
        is_top = not ((span.is_last and self.stretches.trains_behind) or any(map(self.stretches.trains, behind)))
        return self.stretches.split_block(
            index, keeps_gradients=keeps_gradients, borrowed=_borrowed(span, index), is_top=is_top
        )

    def _keeps_gradients(self, index: int) -> bool:
        return self.copies.are_used or self.units.keeps_gradients_of(self._layers[1 + index])

    def _free_tables(self) -> None:
        stretches = self.stretches
        self.memory.change(self._gone_after_forward - stretches.tables - stretches.sizes.flags)

    @property
    def _gone_after_forward(self) -> int:
        """What blocks share and backward does without; a checkpoint holds what its block was given."""
        stretches = self.stretches
        if stretches.kept is not None:
            return 0
        tables = 0 if stretches.turns_back else stretches.tables
        # A ring keeps them for its own backward.
        return tables + (0 if stretches.sizes.method == "ring" else stretches.sizes.flags)


def _borrowed(span: Span, index: int) -> Borrowed:
    """What comes from another stage lies where it was received."""
    return Borrowed(
        stream=index == span.blocks[0] and not span.is_first,
        gradient=index == span.blocks[-1] and not span.is_last,
    )
