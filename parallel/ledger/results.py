"""Results of a block's ops: computed, kept by a policy, or taken from what it kept."""

from collections.abc import Collection

from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.pieces import Memory, Piece, Saved


class Results:
    """Results of a block's ops: computed, kept by a policy, or taken from what it kept."""

    def __init__(
        self,
        memory: Memory,
        sizes: BlockSizes,
        kept: Collection[str],
        cache: Saved,
        saved: Saved | None,
        *,
        again: bool,
    ) -> None:
        """Nothing is kept yet.

        Args:
            memory: Where ops run.
            sizes: Of the block.
            kept: Names of what a policy keeps.
            cache: Where it is kept.
            saved: Gets what backward needs. None: nothing is kept for it.
            again: Whether the block is computed again.
        """
        self._memory, self._sizes, self._kept, self._cache = memory, sizes, kept, cache
        self._saved, self._again = saved, again

    def write(self, name: str) -> Piece:
        """What a projection adds to the stream; of a sum over ranks the sum is what may be kept.

        Args:
            name: The projection.
        """
        memory, sizes = self._memory, self._sizes
        if not sizes.splits:
            return self(name, sizes.whole)
        partial = [memory.new(sizes.whole)]
        if sizes.splits_stream:
            partial.append(memory.new(sizes.whole))
        return self(name, sizes.stream)

    def __call__(self, name: str, num_bytes: int) -> Piece:
        """The result of that name, with what an adapter adds to it.

        Args:
            name: Of the op.
            num_bytes: Its size.
        """
        out, adapter = self._result(name, num_bytes), self._sizes.gradients.adapter(name)
        if adapter is None:
            return out
        low = self._result(f"{name} first", self._sizes.low(adapter))
        if self._saved is not None:
            self._saved[f"{name} low"] = low
        wide = self._result(f"{name} second", num_bytes)
        scaled = self._memory.new(num_bytes)
        del wide, low
        total = self._memory.new(num_bytes)
        del out, scaled
        return total

    def aside(self, name: str, num_bytes: int) -> None:
        """More of what an op gives, which goes at once unless a policy keeps the op's results.

        Args:
            name: Of the op.
            num_bytes: Its size.
        """
        if self._again:
            self._cache.pop(f"{name} aside", None)
        elif name in self._kept:
            self._cache[f"{name} aside"] = self._memory.new(num_bytes)

    def _result(self, name: str, num_bytes: int) -> Piece:
        if self._again and name in self._cache:
            return self._cache.pop(name)
        piece = self._memory.new(num_bytes)
        if not self._again and name in self._kept:
            self._cache[name] = piece
        return piece
