"""Follows flattened units that no rank shards: they are used where they lie, or as copies in another dtype."""

from parallel.ledger.parts import UnitSpec
from parallel.ledger.pieces import Memory


class UnitsInPlace:
    """Units of one rank."""

    def __init__(self, memory: Memory, stored: int, itemsize: int) -> None:
        """None is used.

        Args:
            memory: What is held.
            stored: Bytes of an element as it is stored.
            itemsize: Bytes of one in the computation.
        """
        self._memory, self._stored, self._itemsize = memory, stored, itemsize
        self._copies: dict[UnitSpec, int] = {}
        self._waiting: set[UnitSpec] = set()

    def use(self, unit: UnitSpec, num_bytes: int) -> None:
        """Makes the copy of a unit, if it is to be used as one.

        Args:
            unit: The unit.
            num_bytes: Its size in the dtype of the computation.
        """
        if self._itemsize != self._stored and unit not in self._copies:
            self._memory.change(num_bytes)
            self._copies[unit] = num_bytes

    def free(self, unit: UnitSpec) -> None:
        """Frees the copy of a unit.

        Args:
            unit: The unit.
        """
        self._memory.change(-self._copies.pop(unit, 0))

    def free_all(self) -> None:
        """Frees all copies."""
        for unit in [*self._copies]:
            self.free(unit)

    def join(self, unit: UnitSpec, gradients: int, num_bytes: int, *, reduces: bool) -> None:
        """Joins gradients to a flat one, adds it to what waits of earlier micro-batches, and casts it to be summed.

        Args:
            unit: Whose backward is over.
            gradients: Bytes of its gradients as backward made them.
            num_bytes: Its size in the dtype of the computation.
            reduces: Whether gradients are summed over ranks.
        """
        self.free(unit)
        if not gradients:
            return
        self._memory.change(num_bytes - gradients, num_bytes)
        if unit in self._waiting:
            self._memory.change(-num_bytes)
        self._waiting.add(unit)
        if reduces:
            stored = num_bytes // self._itemsize * self._stored
            self._memory.change(stored - num_bytes, stored if stored > num_bytes else 0)
            self._waiting.remove(unit)
