"""Makes configs of plain values, strictly: what a checkpoint or a command line says of a recipe."""

from collections.abc import Mapping
from typing import Any, TypeVar

import cattrs

from models.config import ModelConfig
from models.registry import family
from recipes.recipe import Recipe

T = TypeVar("T")


def from_json(values: Mapping[str, Any]) -> Recipe:
    """The recipe that `Recipe.to_json` wrote, as a checkpoint holds it.

    Args:
        values: What `to_json` gave.

    Raises:
        ValueError: If there is none, or it is not one of this version.
    """
    if not values:
        raise ValueError("the checkpoint holds no recipe: a script saved it, not recipes.train")
    try:
        return structure(values, Recipe)
    except ValueError as error:
        raise ValueError(f"the checkpoint's recipe does not fit this version of meshwright: {error}") from error


def structure(values: Mapping[str, Any], kind: type[T]) -> T:
    """A config of plain values; nothing is converted but a list to a tuple and an integer to a float.

    Args:
        values: Field -> value.
        kind: Class of the config.

    Raises:
        ValueError: If a field is unknown, missing, of another type or out of its range; the message names all.
    """
    try:
        return _converter().structure(dict(values), kind)
    except Exception as error:
        lines = cattrs.transform_error(error, path="", format_exception=_describe)
        # What the whole config is refused for has no path.
        raise ValueError("; ".join(line.removesuffix(" @ ") for line in lines)) from error


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (int, float, bool, str):
        converter.register_structure_hook(kind, _strict)

    def model_config(value: dict[str, Any], _: object) -> ModelConfig:
        fields = dict(value)
        return converter.structure(fields, family(fields.pop("family")).config)

    converter.register_structure_hook_func(lambda kind: kind is ModelConfig, model_config)
    return converter


def _strict(value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _describe(error: BaseException, _: type | None) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return f"unknown field {', '.join(sorted(error.extra_fields))}"
    if isinstance(error, KeyError):
        return f"missing field {error.args[0]}"
    return str(error)
