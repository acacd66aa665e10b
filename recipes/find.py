"""Finds recipes by name, or in a Python file of the user's own."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

import recipes
from recipes.recipe import Recipe
from recipes.user_files import import_user_file

DEFAULT_RECIPE = "llama_debug"
"""The recipe that runs anywhere, and whose fields the help shows where none is named."""

FAMILIES = ("llama_", "moe_", "smollm2_")
"""How the names of modules begin that hold a recipe."""


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(each.name for each in pkgutil.iter_modules(recipes.__path__) if each.name.startswith(FAMILIES))


def intended_world_size(name: str) -> int | None:
    """Ranks that the layout of a recipe that comes with the package is meant for; None: any number.

    Args:
        name: A name of `recipe_names`.
    """
    world_size: int | None = getattr(importlib.import_module(f"recipes.{name}"), "WORLD_SIZE", None)
    return world_size


def find_recipe(name: str) -> Recipe:
    """A recipe by name, or from a Python file of the user's own.

    Args:
        name: A name of `recipe_names`, or the path of a file that ends in .py; its function `recipe()` is called.

    Raises:
        ValueError: If there is no such recipe or file, or the file does not make one.
    """
    if name.endswith(".py"):
        return _recipe_of_file(Path(name))
    if name not in recipe_names():
        raise ValueError(f"unknown recipe {name!r}; legal: {', '.join(recipe_names())}, or the path of a .py file")
    made: Recipe = importlib.import_module(f"recipes.{name}").recipe()
    return made


def _recipe_of_file(path: Path) -> Recipe:
    """Calls `recipe()` of a file of the user's."""
    module = import_user_file(path)
    make: Callable[[], object] | None = getattr(module, "recipe", None)
    try:
        made = make() if callable(make) else None
    except Exception as error:
        raise ValueError(f"the recipe file {str(path)!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Recipe):
        raise ValueError(f"the recipe file {str(path)!r} must define a function recipe() that returns a Recipe")
    return made
