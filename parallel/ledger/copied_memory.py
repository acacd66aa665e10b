"""Follows the copies in the dtype of the computation that a model which no rank shards makes of its parameters."""

from math import prod

from parallel.ledger.block_gradients import PROJECTIONS
from parallel.ledger.block_sizes import itemsizes, runs_on_copies
from parallel.ledger.parts import ModelParts
from parallel.ledger.pieces import Memory


class Copies:
    """Copies of one rank's parameters, all made at the start of forward.

    Backward frees a weight's copy when it has used it, and casts the gradients of copies when it has all of them.

    Attributes:
        are_used: Whether there are any.
    """

    def __init__(self, parts: ModelParts, memory: Memory, tp_rank: int) -> None:
        """There are none yet.

        Args:
            parts: The rank's part of the model.
            memory: What is held.
            tp_rank: Place of the rank along `tp`.
        """
        stored, itemsize, *_ = itemsizes(parts)
        self.are_used = runs_on_copies(parts)
        self._memory, self._stored, self._itemsize = memory, stored, itemsize
        copied = parts.parameters if self.are_used else ()
        self._counts = {each: prod(each.split(parts.config.tp, tp_rank)) for each in copied}
        in_blocks = {f"{block.fqn}.{name}.weight" for block in parts.plan.blocks for name in PROJECTIONS.values()}
        used = sum(count for each, count in self._counts.items() if each.fqn in in_blocks)
        at_ends = sum(count for each, count in self._counts.items() if each.fqn in ("embed.weight", "head.weight"))
        self._all = sum(self._counts.values())
        self._at_ends, self._others = at_ends, self._all - used - at_ends

    def make(self) -> None:
        """Copies all parameters."""
        self._change(self._all)

    def end_forward(self) -> None:
        """Frees those of the embedding, whose backward needs none, and of the head, which has its gradients by then."""
        self._change(-self._at_ends)

    def end_backward(self, *, adds: bool, goes: bool) -> None:
        """Casts gradients to the dtype in which parameters are stored.

        Args:
            adds: Whether they are added to those of earlier micro-batches.
            goes: Whether they end in buckets, with what they are added to.
        """
        if not self.are_used:
            return
        self._change(-self._others)
        for each, count in self._counts.items():
            if each.trainable:
                made = count * self._stored
                stays = made * ((not adds and not goes) - (adds and goes))
                self._memory.change(stays - count * self._itemsize, made)

    def _change(self, count: int) -> None:
        if self.are_used:
            self._memory.change(count * self._itemsize)
