"""Follows the sums of units' gradients over ranks."""

from parallel.ledger.block_sizes import itemsizes
from parallel.ledger.padding import SizesOfUnits
from parallel.ledger.parts import ModelParts, UnitSpec, num_shards
from parallel.ledger.pieces import Memory


class UnitSums:
    """Sums of one rank, each of which holds what it is made of until the next one."""

    def __init__(self, parts: ModelParts, memory: Memory, tp_rank: int) -> None:
        """Nothing is summed.

        Args:
            parts: The rank's part of the model.
            memory: What is held.
            tp_rank: Place of the rank along `tp`.
        """
        self._memory, self._sizes = memory, SizesOfUnits(parts.config, tp_rank)
        self._stored, self._itemsize, _, self._reduced = itemsizes(parts)
        self._num_shards = num_shards(parts.config)
        self._held = 0

    def add(self, unit: UnitSpec, gradients: int, waiting: int, *, adds: bool) -> None:
        """Sums gradients of a unit over ranks.

        Args:
            unit: The unit.
            gradients: Bytes of what this micro-batch made.
            waiting: Bytes of what has waited of others.
            adds: Whether there are sums already, to which these are added.
        """
        sizes = self._sizes.of(unit)
        if not sizes.trained:
            return
        count = sizes.summed
        # Ranks that have the same experts share them.
        shards = self._num_shards // unit.parameters[0].ep
        size, out = count * self._reduced, count // shards * self._reduced
        self._memory.change(-self._held)
        self._held = size
        held = gradients
        if waiting:
            held = waiting
            self._memory.change(-gradients)
        self._memory.change(size, size)
        last = 0
        if shards > 1:
            last = held * sizes.last // sizes.trained
        self._memory.change(last - held)
        self._memory.change(out, out + (size if shards == 1 else 0))
        self._memory.change(-last)
        if self._reduced != self._stored:
            wide = count // shards * self._stored
            self._memory.change(wide - out, wide)
            out = wide
        if adds:
            # Added to what earlier micro-batches left.
            self._memory.change(-out)

    def add_flat(self, num_bytes: int, *, adds: bool) -> None:
        """Sums a flat gradient over ranks; what is sent is freed at once.

        Args:
            num_bytes: Its size in the dtype of the computation.
            adds: Whether there is a sum already, to which this one is added.
        """
        size = num_bytes // self._itemsize * self._reduced
        if self._reduced != self._itemsize:
            self._memory.change(size - num_bytes, size)
        out = size // self._num_shards
        self._memory.change(out - size, out + size)
        if self._reduced != self._stored:
            wide = out // self._reduced * self._stored
            self._memory.change(wide - out, wide)
            out = wide
        self._memory.change(-out if adds else 0)

    def end(self) -> None:
        """Frees what the last sum was made of."""
        self._memory.change(-self._held)
        self._held = 0
