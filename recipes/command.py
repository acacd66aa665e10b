"""Turns a command line into a recipe, and says what is wrong with it in one message."""

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from recipes.launch import fail, world_size_to_come
from recipes.recipe import Recipe, find_recipe, recipe_names


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """A training run.

    Attributes:
        nproc: Ranks to start on this machine when no launcher has; default: one for each GPU, or 2 without any.
        debug: Show the traceback of an error.
        recipe: What to train and how to split it.
    """

    nproc: int | None = None
    debug: bool = False
    recipe: Annotated[Recipe, tyro.conf.arg(name="")]


def parse_train(arguments: list[str] | None = None) -> TrainCommand:
    """Reads `RECIPE [overrides]` and checks all that needs no rank.

    Args:
        arguments: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: After the help or an error message.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    usage = "usage: python -m recipes.train RECIPE [--help] [overrides]"
    listing = "recipes: " + ", ".join(recipe_names()) + ", or the path of a .py file with a function recipe()"
    if not words or words[0] in ("-h", "--help"):
        print(f"{usage}\n{listing}\nAll fields of the first one follow; those of another: RECIPE --help\n")
        words = [recipe_names()[0], "--help"]
    name, *overrides = words
    debug = "--debug" in overrides
    if name.startswith("-"):
        fail(ValueError(f"the first word must be a recipe, got {name!r}; {usage}; {listing}"), debug=debug)
    try:
        default = TrainCommand(recipe=find_recipe(name))
        command = tyro.cli(
            TrainCommand,
            default=default,
            args=overrides,
            prog=f"python -m recipes.train {name}",
            config=(tyro.conf.AvoidSubcommands,),
        )
        command.recipe.check(world_size_to_come(command.nproc))
    except (ValueError, OSError) as error:
        fail(error, debug=debug)
    return command
