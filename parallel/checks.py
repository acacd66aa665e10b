"""Checks of single values that several configs share."""

from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints


def check_integer(name: str, value: object, *, minimum: int) -> None:
    """Refuses what is no integer, or less than `minimum`.

    Args:
        name: The field, as the user knows it.
        value: Its value.
        minimum: The least legal value.

    Raises:
        ValueError: If the value is refused.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an integer")
    if value < minimum:
        raise ValueError(f"{name}={value} must be at least {minimum}")


def check_choices(config: object) -> None:
    """Refuses a name that its field's Literal type does not list, and a bool field that holds no bool.

    Args:
        config: A dataclass.

    Raises:
        ValueError: If a value is refused.
    """
    hints = _hints(type(config))  # type: ignore[arg-type]  # a class can be hashed, which mypy overlooks
    for each in fields(config):  # type: ignore[arg-type]  # mypy cannot bound `object` to dataclass instances
        value, hint = getattr(config, each.name), hints[each.name]
        members = get_args(hint)
        optional = type(None) in members
        if optional:
            members = get_args(members[0]) if get_origin(members[0]) is Literal else ()
        if value is None and optional:
            continue
        if members and value not in members:
            raise ValueError(f"unknown {each.name} {value!r}; legal: {', '.join(map(str, members))}")
        if hint is bool and not isinstance(value, bool):
            raise ValueError(f"{each.name}={value!r} must be true or false")


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of a config's fields; a planner makes thousands of configs, and finding these takes most of the time."""
    return get_type_hints(kind)
