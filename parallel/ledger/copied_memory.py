"""Follows the copies in the dtype of the computation that a model which no rank shards makes of its parameters."""

from collections.abc import Mapping
from math import prod

from parallel.compute_dtype import blocks_that_cast
from parallel.ledger.block_gradients import PROJECTIONS
from parallel.ledger.block_sizes import itemsizes, runs_on_copies
from parallel.ledger.parts import ModelParts, ParameterSpec
from parallel.ledger.pieces import Memory
from parallel.plan import innermost


class Copies:
    """Copies of one rank's parameters, made at the start of forward but for those of blocks that are computed again.

    Backward frees a weight's copy when it has used it, and casts the gradients of copies when it has all of them: of a
    block that makes its own when the block is done.

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
        counts = {each: prod(each.split(parts.config.tp, tp_rank)) for each in copied}
        apart = blocks_that_cast(parts.config, parts.plan) if self.are_used else ()
        self._blocks = [block.fqn for block in parts.plan.blocks]
        self._within: dict[str, dict[ParameterSpec, int]] = {fqn: {} for fqn in apart}
        self._counts: dict[ParameterSpec, int] = {}
        for each, count in counts.items():
            self._within.get(innermost(each.fqn, self._within) or "", self._counts)[each] = count
        in_blocks = {f"{block.fqn}.{name}.weight" for block in parts.plan.blocks for name in PROJECTIONS.values()}
        used = sum(count for each, count in self._counts.items() if each.fqn in in_blocks)
        at_ends = sum(count for each, count in self._counts.items() if each.fqn in ("embed.weight", "head.weight"))
        self._all = sum(self._counts.values())
        self._at_ends, self._others = at_ends, self._all - used - at_ends

    def made_by(self, index: int) -> int:
        """Bytes of the copies that a block makes of its own parameters, whenever it runs.

        Args:
            index: Its place among the rank's blocks.
        """
        return sum(self._within.get(self._blocks[index], {}).values()) * self._itemsize

    def end_block(self, index: int, *, adds: bool, goes: bool) -> None:
        """Casts the gradients of a block that makes its own copies.

        Args:
            index: Its place among the rank's blocks.
            adds: As of `end_backward`.
            goes: As of `end_backward`.
        """
        self._cast(self._within.get(self._blocks[index], {}), adds=adds, goes=goes)

    def make(self) -> None:
        """Copies all parameters but those of such blocks."""
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
        self._cast(self._counts, adds=adds, goes=goes)

    def _cast(self, counts: Mapping[ParameterSpec, int], *, adds: bool, goes: bool) -> None:
        for each, count in counts.items():
            if each.trainable:
                made = count * self._stored
                stays = made * ((not adds and not goes) - (adds and goes))
                self._memory.change(stays - count * self._itemsize, made)

    def _change(self, count: int) -> None:
        if self.are_used:
            self._memory.change(count * self._itemsize)
