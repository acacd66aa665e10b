"""Holds figures against what is aimed at."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from recipes.metrics import format_bytes


@dataclass(frozen=True, kw_only=True)
class Aim:
    """A figure and its limit.

    Attributes:
        what: What was measured, in words.
        value: The figure; a ratio unless `unit` says otherwise.
        limit: What it may be.
        at_least: Whether it should be the limit or more; otherwise the limit or less.
        unit: `bytes`, `s` or nothing.
    """

    what: str
    value: float
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the figure is within its limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_json(self) -> dict[str, object]:
        """The figure as JSON can hold it."""
        return asdict(self) | {"met": self.met}

    def shown(self, value: float) -> str:
        """A value in its unit."""
        return format_bytes(round(value)) if self.unit == "bytes" else f"{value:.3f} {self.unit}".rstrip()


def aims_table(aims: Sequence[Aim]) -> Table:
    """Figures for people, each with its limit and whether it is met.

    Args:
        aims: The figures.
    """
    table = Table("figure", "measured", "aim", "", title="what is aimed at")
    for each in aims:
        limit = f"{'>=' if each.at_least else '<='} {each.shown(each.limit)}"
        table.add_row(each.what, each.shown(each.value), limit, "met" if each.met else "NOT met")
    return table
