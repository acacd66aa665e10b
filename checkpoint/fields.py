"""Takes typed fields out of parsed JSON, naming the place of what is missing or of another type."""

from typing import Any, TypeVar

from checkpoint.layout import Axes
from checkpoint.strict_json import Json

T = TypeVar("T")


class Fields:
    """The fields of a JSON object that anybody may have written, each refused unless it is what is asked for."""

    def __init__(self, value: Json, where: str) -> None:
        """Looks into an object.

        Args:
            value: What should be one.
            where: Its place, for messages.

        Raises:
            ValueError: If it is none.
        """
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a JSON object")
        self.value, self.where = value, where

    def get(self, name: str, kind: type[T]) -> T:
        """A field of a type."""
        value = self.value.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ValueError(f"{self.where}: {name!r} must be of type {kind.__name__}")
        return value

    def sub(self, name: str) -> "Fields":
        """A field that is an object."""
        return Fields(self.value.get(name), f"{self.where}: {name!r}")

    def count(self, name: str) -> int:
        """A field that is a number of things."""
        return self._natural(self.get(name, int), name)

    def counts(self, name: str) -> tuple[int, ...]:
        """A field that is a list of such numbers."""
        return tuple(self._natural(item, name) for item in self.get(name, list))

    def counts_by_name(self, name: str) -> Axes:
        """A field that is an object of such numbers; nothing where there is none."""
        if name not in self.value:
            return ()
        return tuple((axis, self.sub(name).count(axis)) for axis in self.get(name, dict))

    def pairs(self, name: str) -> Axes:
        """A field that is a list of pairs of a name and such a number; nothing where there is none."""
        if name not in self.value:
            return ()
        pairs = self.get(name, list)
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
                raise ValueError(f"{self.where}: {name!r} must hold pairs of an axis and a dim, got {pair!r}")
        return tuple((axis, self._natural(dim, name)) for axis, dim in pairs)

    def _natural(self, value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise ValueError(f"{self.where}: {name!r} must hold integers from 0 that fit 63 bits, got {value!r}")
        return value
