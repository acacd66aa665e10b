"""A figure that tutorials of the field print, with how far one may be from it to be the same."""

from collections.abc import Callable
from typing import NamedTuple

from parallel.plan import ModelShape

GPU = "a100-80gb"
"""The GPU that most of these tutorials have in mind."""

SHARES = 0.05
"""How far a share may be from the one said."""
RATIOS = 0.1
"""How far a speed-up may be from the one said, as a share of that."""
HALF = 0.1
"""How far what is said to be half may be from that: it is said of so many models that it cannot be meant closer."""

Shapes = Callable[[str], ModelShape]
"""Gives the shape of a model by its name."""


class Claim(NamedTuple):
    """A figure of tutorials.

    Attributes:
        claim: What they say.
        figure: What the planner says.
        holds: Whether that is the same, within the tolerances of this file.
        assumption: Under which the claim is true.
    """

    claim: str
    figure: str
    holds: bool
    assumption: str


def as_markdown(found: tuple[Claim, ...]) -> str:
    """The claims as a table.

    Args:
        found: What `claims` gave.
    """
    head = "| tutorials say | the planner says | holds | it would be true if |\n|---|---|---|---|\n"
    return (
        head
        + "".join(
            f"| {each.claim} | {each.figure} | {'yes' if each.holds else 'no'} | {each.assumption} |\n"
            for each in found
        )
        + (
            f"\nWhat holds is computed: bytes to 0.01 GB, speed-ups within {RATIOS:.0%}, shares within "
            f"{100 * SHARES:.0f} points, halves within {100 * HALF:.0f} points, and a number of GPUs where the model "
            "fits them.\n"
        )
    )
