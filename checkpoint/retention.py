"""Says which checkpoints of a run stay when a new one is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROTECTED_NAME = "protected"
"""A file of this name in a checkpoint keeps it for good; users make it by hand, such as with `touch`."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which complete checkpoints stay; those that hold a file named `protected` stay in any case.

    Attributes:
        last: How many of the newest stay, at least 1.
        every: Checkpoints of steps that are multiples of this stay for good; None: of none.
    """

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a number is below 1.
        """
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None and value < 1:
                raise ValueError(f"retention {name}={value} must be at least 1; save without retention to keep all")

    def superfluous(self, complete: Sequence[tuple[int, Path]]) -> list[Path]:
        """The checkpoints that go.

        Args:
            complete: Step and folder of each complete checkpoint, from the highest step downwards.
        """
        return [path for step, path in complete[self.last :] if not self._stays(step, path)]

    def _stays(self, step: int, path: Path) -> bool:
        return (self.every is not None and step % self.every == 0) or is_protected(path)


def is_protected(path: Path) -> bool:
    """Whether a user has protected a checkpoint.

    Args:
        path: The folder of one step.
    """
    return (path / PROTECTED_NAME).exists()
