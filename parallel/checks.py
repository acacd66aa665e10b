"""Checks of single values that several configs share."""


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
