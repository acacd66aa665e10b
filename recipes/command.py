"""Turns a command line into a recipe, and says what is wrong with it in one message."""

import dataclasses
import sys
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from recipes.launchers import is_first_rank, world_size_to_come
from recipes.messages import one_message
from recipes.recipe import Recipe, changed_fields, find_recipe, recipe_names

T = TypeVar("T")


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


def parse_train(arguments: list[str] | None = None) -> tuple[TrainCommand, list[str]]:
    """Reads `RECIPE [overrides]` and checks all that needs no rank.

    Args:
        arguments: Words of the command line; None takes the process's own.

    Returns:
        The command, and the fields in which its recipe differs from the named one.

    Raises:
        SystemExit: After the help or an error message.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with one_message(debug="--debug" in words):
        usage = "usage: python -m recipes.train RECIPE [--help] [overrides]"
        listing = "recipes: " + ", ".join(recipe_names()) + ", or the path of a .py file with a function recipe()"
        if not words or words[0] in ("-h", "--help"):
            if is_first_rank():
                print(f"{usage}\n{listing}\nAll fields of the first one follow; those of another: RECIPE --help\n")
            words = [recipe_names()[0], "--help"]
        name, *overrides = words
        if name.startswith("-"):
            raise ValueError(f"the first word must be a recipe, got {name!r}; {usage}; {listing}")
        named = find_recipe(name)
        command = parse(TrainCommand, overrides, f"python -m recipes.train {name}", TrainCommand(recipe=named))
        command.recipe.check(world_size_to_come(command.nproc))
    return command, changed_fields(named.to_json(), command.recipe.to_json())


def parse(kind: type[T], arguments: list[str] | None, program: str, default: T | None = None) -> T:
    """Reads a command line; help and errors are printed on rank 0 alone.

    Args:
        kind: Dataclass of the command.
        arguments: Words of the command line; None takes the process's own.
        program: How the command is called.
        default: Values of what the command line does not say; None: those of the class.

    Raises:
        SystemExit: After the help or an error message.
    """
    return tyro.cli(
        kind,
        args=arguments,
        prog=program,
        default=tyro.MISSING_NONPROP if default is None else default,
        config=(tyro.conf.AvoidSubcommands,),
        console_outputs=is_first_rank(),
        registry=_registry(),
    )


def _registry() -> ConstructorRegistry:
    registry = ConstructorRegistry()
    registry.primitive_rule(_optional_config)
    return registry


def _optional_config(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """One word for a config that may be None, which would be no option at all where it is None by default."""
    members = get_args(info.type)
    optional = get_origin(info.type) in (Union, UnionType) and len(members) == 2 and members[1] is type(None)
    if not optional or not dataclasses.is_dataclass(members[0]):
        return None
    config: Any = members[0]

    def write(value: Any) -> list[str]:
        return ["None" if value is None else ",".join(f"{k}={v}" for k, v in dataclasses.asdict(value).items())]

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{None}|" + ",".join(f"{each.name}=..." for each in dataclasses.fields(config)),
        instance_from_str=lambda words: None if words[0] == "None" else _config_of_word(config, words[0]),
        is_instance=lambda value: value is None or isinstance(value, config),
        str_from_instance=write,
    )


def _config_of_word(config: Any, word: str) -> Any:
    """Reads `name=value,name=value`; what is left out has its default."""
    # Here, because no other option needs it.
    from recipes.structure import structure

    values: dict[str, Any] = {}
    for item in word.split(","):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"expected name=value, got {item!r}")
        try:
            values[name] = int(value)
        except ValueError:
            values[name] = float(value)
    return structure(values, config)
