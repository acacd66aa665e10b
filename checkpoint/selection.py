"""Which entries of a state a load fills, and what they are called in the checkpoint."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

T = TypeVar("T")

Keys = Sequence[str] | Mapping[str, str] | None
"""Patterns of names, such as `model.blocks.*`; or names with what each is called in the checkpoint; None: all."""


class Selection:
    """Canonical names of a state, held against those of a checkpoint."""

    def __init__(self, keys: Keys) -> None:
        """Keeps what is chosen.

        Raises:
            ValueError: If it is one string, whose letters would pass for patterns.
        """
        if isinstance(keys, str):
            raise ValueError(f"keys={keys!r} must be a list of patterns: [{keys!r}]")
        self._names = dict(keys) if isinstance(keys, Mapping) else None
        self._patterns = None if keys is None or isinstance(keys, Mapping) else tuple(keys)

    def takes(self, name: str) -> bool:
        """Whether an entry of the state is to be filled."""
        if self._names is not None:
            return name in self._names
        return self._patterns is None or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def stored_name(self, name: str) -> str:
        """What an entry that is to be filled is called in the checkpoint."""
        return name if self._names is None else self._names[name]

    def stored(self, entries: Mapping[str, T]) -> dict[str, T]:
        """The chosen ones of a checkpoint's entries, by the names of the state."""
        if self._names is not None:
            return {name: entries[stored] for name, stored in self._names.items() if stored in entries}
        return {name: entry for name, entry in entries.items() if self.takes(name)}

    def check(self, needed: Mapping[str, object], found: Mapping[str, object]) -> None:
        """Refuses what is chosen and is nowhere.

        Args:
            needed: Names that the state can fill.
            found: Names that `stored` gave.

        Raises:
            ValueError: If a pattern matches nothing, or a name is none of the state.
        """
        names = needed.keys() | found.keys()
        unused = [
            *(name for name in self._names or () if name not in needed and name not in found),
            *(each for each in self._patterns or () if not any(fnmatchcase(name, each) for name in names)),
        ]
        if unused:
            raise ValueError(f"keys {unused} match no entry of the state or the checkpoint; names are like model.<fqn>")
