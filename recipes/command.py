"""Turns a command line into a recipe, and says what is wrong with it in one message."""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from parallel.schedules import traits_of
from recipes.find import DEFAULT_RECIPE, find_recipe, intended_world_size, recipe_names
from recipes.launchers import is_first_rank, world_size_to_come
from recipes.messages import one_message
from recipes.model import model_and_plan
from recipes.recipe import Recipe, changed_fields
from recipes.refusals import in_one_form

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
        listing = f"recipes: {_listing()}, or the path of a .py file with a function recipe()"
        if not words or words[0] in ("-h", "--help"):
            if is_first_rank():
                print(f"{usage}\n{listing}\nAll fields of {DEFAULT_RECIPE} follow; those of another: RECIPE --help\n")
            words = [DEFAULT_RECIPE, "--help"]
        name, *overrides = words
        if name.startswith("-"):
            raise ValueError(f"the first word must be a recipe, got {name!r}; {usage}; {listing}")
        named = find_recipe(name)
        command = parse(TrainCommand, overrides, f"python -m recipes.train {name}", TrainCommand(recipe=named))
        command.recipe.check(world_size_to_come(command.nproc))
        _warn(command.recipe)
        if command.recipe.lora.rank:
            # Whether targets are there only the model tells, which takes a second to build if it is large.
            model_and_plan(command.recipe)
    return command, changed_fields(named.to_json(), command.recipe.to_json())


def _warn(recipe: Recipe) -> None:
    """Says what works but costs more than it saves."""
    parallel = recipe.parallel
    splits = parallel.pp > 1 and traits_of(parallel).splits_backward
    if splits and parallel.activation_checkpointing == "full":
        warnings.warn(
            f"activation_checkpointing='full' with schedule={parallel.schedule!r}, which splits backward, computes a "
            "block again for each of its weights; selective or none costs less, or a schedule such as '1f1b'",
            stacklevel=2,
        )


def _listing() -> str:
    """The recipes that come with the package, each with the ranks that it is meant for."""
    sizes = {name: intended_world_size(name) for name in recipe_names()}
    return ", ".join(name if size is None else f"{name} (for {size} ranks)" for name, size in sizes.items())


def parse(kind: type[T], arguments: list[str] | None, program: str, default: T | None = None) -> T:
    """Reads a command line; help and errors are printed on rank 0 alone.

    Args:
        kind: Dataclass of the command.
        arguments: Words of the command line; None takes the process's own.
        program: How the command is called.
        default: Values of what the command line does not say; None: those of the class.

    Raises:
        SystemExit: After the help or an error message, see `in_one_form`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with in_one_form(words):
        return tyro.cli(
            kind,
            args=words,
            prog=program,
            default=tyro.MISSING_NONPROP if default is None else default,
            config=(tyro.conf.AvoidSubcommands,),
            console_outputs=is_first_rank(),
            registry=_registry(words),
        )


def _registry(words: Sequence[str]) -> ConstructorRegistry:
    registry = ConstructorRegistry()
    registry.primitive_rule(partial(_config_in_words, words))
    return registry


def _config_in_words(line: Sequence[str], info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """A word for a config that may be None, or for each of several, which by default would be no options at all."""
    members: tuple[Any, ...] = (*get_args(info.type), None, None)
    config, other = members[:2]
    optional = get_origin(info.type) in (Union, UnionType) and other is type(None)
    several = get_origin(info.type) is tuple and other is Ellipsis
    is_config = dataclasses.is_dataclass(config)
    if not is_config or not (optional or several):
        return None

    def read(words: list[str]) -> Any:
        if several:
            return tuple(_read_config(config, word, line) for word in words)
        return None if words[0] == "None" else _read_config(config, words[0], line)

    def write(value: Any) -> list[str]:
        return [_write_config(each) for each in value] if several else [_write_config(value) if value else "None"]

    form = ",".join(f"{each.name}=..." for each in dataclasses.fields(config))
    return PrimitiveConstructorSpec(
        nargs="*" if several else 1,
        metavar=f"[{form} ...]" if several else f"{{None}}|{form}",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple) if several else value is None or isinstance(value, config),
        str_from_instance=write,
    )


def _write_config(config: Any) -> str:
    return ",".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def _read_config(config: Any, word: str, line: Sequence[str]) -> Any:
    """Reads `name=value,name=value` of a command line, whose option an error names; defaults fill what is left out."""
    try:
        return _read_values(config, word)
    except ValueError as error:
        raise ValueError(f"{_option(line, word)}{word}: {error}") from error


def _option(line: Sequence[str], word: str) -> str:
    """The option of a command line that a word is given to, with a space; nothing where it is given to none."""
    option = ""
    for each in line:
        if each.startswith("--"):
            option, _, each = each.partition("=")
        if each == word:
            return f"{option} "
    return ""


def _read_values(config: Any, word: str) -> Any:
    # Here, because no other option needs it.
    from recipes.structure import structure

    values: dict[str, Any] = {}
    for item in word.split(","):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"expected name=value, got {item!r}")
        is_text = get_type_hints(config).get(name) is str
        values[name] = value if is_text else _number_or_text(value)
    return structure(values, config)


def _number_or_text(word: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return word
