"""Follows sharding units through a step: gathered, copied out, freed, and their gradients summed over ranks."""

from collections.abc import Mapping, Sequence

from parallel.ledger.block_sizes import itemsizes, runs_on_copies
from parallel.ledger.padding import SizesOfUnits
from parallel.ledger.parts import ModelParts, UnitSpec, is_unit_based, num_shards
from parallel.ledger.pieces import Memory
from parallel.ledger.states import drops_gradient
from parallel.ledger.unit_sums import UnitSums
from parallel.ledger.units_in_place import UnitsInPlace
from parallel.traits import TRAITS


class UnitMemory:
    """Units of one rank, in the order in which `fully_shard` treats them.

    Attributes:
        memory: What is held.
        by_unit: Whether parameters travel in units at all.
        has_buckets: Whether gradients are copied into buckets, which stay, instead.
        in_backward: Whether backward runs.
        reduces: Whether this micro-batch's gradients are summed over ranks.
        adds: Whether gradients are there already, to which new ones are added.
    """

    def __init__(self, parts: ModelParts, memory: Memory, coordinates: Mapping[str, int]) -> None:
        """Nothing is gathered.

        Args:
            parts: The rank's part of the model.
            memory: What is held.
            coordinates: Place of the rank along `fsdp` and `tp`.
        """
        self.memory, self._parts, self._coordinates = memory, parts, coordinates
        tp_rank = coordinates["tp"]
        self._sizes = SizesOfUnits(parts.config, tp_rank)
        self._stored, self._itemsize, _, self._reduced = itemsizes(parts)
        self._num_shards = num_shards(parts.config)
        self.by_unit = is_unit_based(parts.config)
        self.has_buckets = TRAITS[parts.config.data_parallel].has_buckets and not self.by_unit
        self.in_backward = self.adds = False
        self.reduces = True
        # Flattened units that no rank shards are summed over ranks where they lie.
        self._in_place: UnitsInPlace | None = None
        if TRAITS[parts.config.data_parallel].flattens and self._num_shards == 1:
            self._in_place = UnitsInPlace(memory, self._stored, self._itemsize)
        self._is_copied = runs_on_copies(parts)
        self._is_flat = TRAITS[parts.config.data_parallel].flattens
        self._buffer = 0
        self._sums = UnitSums(parts, memory, tp_rank)
        self._gathered: set[UnitSpec] = set()
        self._waiting: dict[UnitSpec, int] = {}

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay where they were made; else each is added or copied to another one at once."""
        return self.by_unit or self._is_copied or not (self.adds or (self.has_buckets and self.reduces))

    def keeps_gradients_of(self, units: Sequence[UnitSpec]) -> bool:
        """The same of units: autograd adds to what waits in the dtype in which it comes.

        Args:
            units: Of one block.
        """
        waits = self._reduced == self._itemsize and any(unit in self._waiting for unit in units)
        # Flattened ones are joined before anything is added.
        return self.keeps_gradients and (self._is_flat or not waits)

    def gradient_bytes(self, unit: UnitSpec) -> int:
        """Gradients of a unit as backward makes them.

        Args:
            unit: The unit.
        """
        return self._sizes.of(unit).trained * self._itemsize

    def enter(self, units: Sequence[UnitSpec]) -> None:
        """Gathers units for their forward, or for their backward if nothing has before.

        Args:
            units: That are needed now.
        """
        for unit in units:
            if not self.by_unit or not unit.parameters or unit in self._gathered:
                continue
            if self._in_place is not None:
                self._in_place.use(unit, self._bytes(unit))
                continue
            if self.in_backward and not unit.gathered_again:
                continue
            if not self.in_backward:
                self._gather(unit)
            self._copy_out(unit)
            self._gathered.add(unit)

    def ahead(self, units: Sequence[UnitSpec]) -> None:
        """Gathers units for a backward to come, which leaves them in the collective's buffer.

        Args:
            units: That are needed next.
        """
        for unit in units:
            if self._in_place is not None and unit.parameters:
                self._in_place.use(unit, self._bytes(unit))
            elif self.by_unit and unit.parameters and unit.gathered_again:
                self._gather(unit)

    def gather_all(self, units: Sequence[UnitSpec]) -> None:
        """Gathers all units of a stage, which stay.

        Args:
            units: Of the stage.
        """
        for unit in units:
            if self.by_unit and unit.parameters:
                self._gather(unit)

    def copy_all(self, units: Sequence[UnitSpec]) -> None:
        """Copies them out when the stage first runs, each out of its buffer.

        Args:
            units: Of the stage.
        """
        self.in_backward = True
        for unit in units:
            if self.by_unit and unit.parameters:
                self._copy_out(unit)
                self._gathered.add(unit)

    def leave(self, units: Sequence[UnitSpec]) -> None:
        """Frees units after their forward, where they do not stay.

        Args:
            units: That have run.
        """
        group = self._parts.config.sharding.reshard_group
        for unit in units:
            if self._in_place is not None:
                self._in_place.free(unit)
            elif unit in self._gathered and not unit.kept:
                size = self._bytes(unit)
                self._gathered.remove(unit)
                self.memory.change((size // group if group and unit.gathered_again else 0) - size)

    def end_forward(self) -> None:
        """Frees the buffer of the last gather, and what was copied where units lie."""
        self.memory.change(-self._buffer)
        self._buffer = 0
        if self._in_place is not None:
            self._in_place.free_all()

    def done(self, units: Sequence[UnitSpec]) -> None:
        """What follows on the backward of units.

        Args:
            units: Whose gradients are there.
        """
        for unit in units:
            gradients = self.gradient_bytes(unit)
            if self._in_place is not None:
                self._in_place.join(unit, gradients, self._bytes(unit), reduces=self.reduces)
                continue
            if self._is_flat:
                self._done_flat(unit, gradients)
                continue
            if self._is_copied:
                # They are cast when all of them are there.
                continue
            if not self.by_unit:
                goes = self.has_buckets and self.reduces
                # Those that have waited for the last micro-batch go with it.
                self.memory.change(-gradients * ((not self.keeps_gradients) + (goes and self.adds)))
                continue
            if self.reduces:
                self.free(unit)
                self._sums.add(unit, gradients, self._waiting.pop(unit, 0), adds=self.adds)
                continue
            if self._parts.config.pp == 1:
                self.free(unit)
            # They wait in the dtype of the sum.
            waiting = gradients // self._itemsize * self._reduced
            if unit in self._waiting:
                self.memory.change(-gradients)
            elif self._reduced != self._itemsize:
                self.memory.change(waiting)
                self.memory.change(-gradients)
            self._waiting[unit] = waiting

    def end_backward(self) -> None:
        """Frees what the last sum was made of."""
        self._sums.end()

    def free(self, unit: UnitSpec) -> None:
        """Frees a gathered unit.

        Args:
            unit: The unit.
        """
        if unit in self._gathered:
            self._gathered.remove(unit)
            self.memory.change(-self._bytes(unit))

    def sum_waiting(self, units: Sequence[UnitSpec]) -> None:
        """Sums gradients that have waited for all micro-batches.

        Args:
            units: Whose.
        """
        for unit in units:
            self.free(unit)
            self._sums.add(unit, 0, self._waiting.pop(unit, 0), adds=self.adds)

    def _done_flat(self, unit: UnitSpec, gradients: int) -> None:
        """Joins gradients to a flat one while the unit is still there, and sums that."""
        if not gradients:
            self.free(unit)
            return
        size = self._bytes(unit)
        self.memory.change(size - gradients, size)
        self.free(unit)
        self.memory.change(-self._waiting.get(unit, 0))
        self._waiting[unit] = size
        if self.reduces:
            drops = drops_gradient(unit, self._parts.config, self._coordinates)
            self._sums.add_flat(self._waiting.pop(unit), adds=self.adds and not drops)

    def _bytes(self, unit: UnitSpec) -> int:
        """A gathered unit in the dtype of the computation, padding included."""
        return self._sizes.of(unit).sent * self._itemsize

    def _shards(self, unit: UnitSpec) -> int:
        """Ranks that share a unit: of experts those that have the same ones."""
        return self._num_shards // (unit.parameters[0].ep if unit.parameters else 1)

    def _gather(self, unit: UnitSpec) -> None:
        size = self._bytes(unit)
        if self._shards(unit) > 1:
            cast = size // self._shards(unit) if self._itemsize != self._stored else 0
            self.memory.change(size, size + cast)

    def _copy_out(self, unit: UnitSpec) -> None:
        """In forward the buffer is freed when the next unit has been copied out."""
        size = self._bytes(unit)
        if self._shards(unit) == 1 and self._itemsize != self._stored:
            largest = self._sizes.of(unit).largest * self._itemsize
            self.memory.change(size, size + largest)
        else:
            self.memory.change(size, size)
        if self._shards(unit) > 1:
            self.memory.change(-(size if self.in_backward else self._buffer))
            self._buffer = 0 if self.in_backward else size
            if group := self.in_backward and unit.gathered_again and self._parts.config.sharding.reshard_group:
                # What the rank has held of it since forward, for its group to gather.
                self.memory.change(-(size // group))
