"""Lists where a training state and a checkpoint do not fit, in one message."""

from dataclasses import dataclass, field, fields

MAX_LISTED = 40
"""Entries that a message lists of each kind of difference."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Where a training state and a checkpoint do not fit.

    Attributes:
        missing: Names that the state needs and the checkpoint lacks.
        unexpected: Names of the checkpoint for which the state has no place.
        shapes: Names whose shapes differ, with both.
        dtypes: Names whose dtypes differ, with both.
        optimizer: How the optimizers differ in class, groups and hyperparameters.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    optimizer: list[str] = field(default_factory=list)

    def of_optimizer(self) -> "Differences":
        """Those of them that concern the optimizer."""
        names = [each.name for each in fields(self) if each.name != "optimizer"]
        kept = {name: [line for line in getattr(self, name) if line.startswith("optimizer.")] for name in names}
        return Differences(**kept, optimizer=self.optimizer)

    def describe(self) -> str:
        """The differences in words, empty if there are none."""
        headings = {
            "missing": "missing from the checkpoint",
            "unexpected": "in the checkpoint only",
            "shapes": "of another shape",
            "dtypes": "of another dtype",
            "optimizer": "optimizer",
        }
        lines: list[str] = []
        for each in fields(self):
            entries: list[str] = getattr(self, each.name)
            if entries:
                lines.append(f"{headings[each.name]} ({len(entries)}):")
                lines += [f"  {entry}" for entry in entries[:MAX_LISTED]]
                if len(entries) > MAX_LISTED:
                    lines.append(f"  ... and {len(entries) - MAX_LISTED} more")
        return "\n".join(lines)
