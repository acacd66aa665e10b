"""Reads and writes JSON that comes back as it went in, or refuses it."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
"""What a checkpoint holds besides tensors."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def to_json(value: Any, where: str) -> Json:
    """A copy that consists of JSON types alone.

    Args:
        value: Nested mappings with string keys, lists, tuples (which become lists), strings, finite numbers,
            booleans and None.
        where: Name of the value, for the message.

    Raises:
        ValueError: If JSON cannot hold some part of it; the message names the part.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        _check_text(value, where)
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, which JSON cannot hold; keep it out of the saved state")
        return float(value)
    if isinstance(value, list | tuple):
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, str):
                _check_text(key, where)
            else:
                raise ValueError(f"{where} has the key {key!r} of type {type(key).__name__}; JSON keys are strings")
        return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
    raise ValueError(
        f"{where} is a {type(value).__name__}; a checkpoint holds tensors of the model and the optimizer, "
        "and JSON (mappings, lists, strings, finite numbers, booleans, None) for all else"
    )


def dumps(value: Json) -> str:
    """The text of a value, on one line."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def digest(value: Json) -> str:
    """A hash that is equal for equal values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, allow_nan=False, sort_keys=True).encode()).hexdigest()


def loads(text: str, where: str) -> Json:
    """Parses text that someone else may have written.

    Args:
        text: JSON.
        where: Name of its source, for the message.

    Raises:
        ValueError: If it is not JSON, repeats a key, holds a number that is not finite, or nests too deeply.
    """
    try:
        value: Json = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite
        )
    except RecursionError:
        raise ValueError(f"{where} nests too deeply to be a manifest") from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if _SURROGATE.search(text):
        _check_text(dumps(value), where)
    return value


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half a surrogate pair, which is no text: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} is there twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse_constant(text)
    return value
