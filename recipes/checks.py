"""Range checks that several configs share."""

import math

from parallel.checks import check_integer as check_integer


def check_number(name: str, value: float, *, above: float | None = None) -> None:
    """Refuses what is no finite number of at least zero, or not more than `above`.

    Args:
        name: The field, as the user knows it.
        value: Its value.
        above: A bound that the value must exceed; None: zero is legal.

    Raises:
        ValueError: If the value is refused.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")
    if above is not None and value <= above:
        raise ValueError(f"{name}={value} must be more than {above}")
    if value < 0:
        raise ValueError(f"{name}={value} must not be negative")


def check_fraction(name: str, value: float) -> None:
    """Refuses what is no number from 0 to 1.

    Args:
        name: The field, as the user knows it.
        value: Its value.

    Raises:
        ValueError: If the value is refused.
    """
    check_number(name, value)
    if value > 1:
        raise ValueError(f"{name}={value} must be at most 1")
