"""Runs a block of a dense decoder forward and holds what it keeps until its backward is over."""

from typing import NamedTuple

from parallel.ledger.block_memory import forward
from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.ends_memory import Stretch
from parallel.ledger.pieces import Memory, Piece, Saved

Kept = frozenset[str] | None
"""Which results a block keeps for backward. None: all that backward needs."""


class Borrowed(NamedTuple):
    """What a block is given that others hold until it is done, as a pipeline does what it has received.

    Attributes:
        stream: Whether the stream before it, in forward and backward.
        gradient: Whether the gradient of the stream after it.
    """

    stream: bool = False
    gradient: bool = False


OWN = Borrowed()
"""A block lets go of all that it is given."""


class BlockRun:
    """A block that has run forward and is to run backward.

    Attributes:
        memory: Where.
        ahead: What forward did to memory.
        saved: What forward kept for backward.
        grads: Of the stream after the block, and then of that before it.
    """

    def __init__(self, sizes: BlockSizes, kept: Kept, borrowed: Borrowed) -> None:
        """Runs forward.

        Args:
            sizes: Of the block.
            kept: Which results it keeps.
            borrowed: What others hold.
        """
        self.memory, self._sizes, self._kept, self._borrowed = Memory(), sizes, kept, borrowed
        self._stream = [self.memory.new(sizes.stream)]
        self._elsewhere = self._stream.copy() if borrowed.stream else []
        base = self.memory.now
        self._results: Saved = {}
        self.grads: list[Piece] = []
        out, self.saved = forward(self.memory, sizes, self._stream[0], kept=kept, cache=self._results)
        self._elsewhere.append(out)
        if kept is None:
            self._stream.clear()
        self.ahead = Stretch(self.memory.now - base, self.memory.peak - base)

    def arrive(self) -> int:
        """Gets the gradient of what it gave; returns what is held then."""
        self.grads.append(self.memory.new(self._sizes.stream))
        if self._borrowed.gradient:
            self._elsewhere += self.grads
        self.memory.peak = self.memory.now
        return self.memory.now

    def recompute(self) -> Saved:
        """Runs the forward of a checkpoint again."""
        return forward(self.memory, self._sizes, self._stream[0], kept=self._kept, cache=self._results, again=True)[1]

    def clear(self) -> None:
        """Lets go of all that forward kept."""
        for each in (self._stream, self._results, self.saved):
            each.clear()
