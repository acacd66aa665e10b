"""The command `python -m recipes.ledger RECIPE`."""

import json
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from parallel.checks import check_integer
from parallel.ledger.optimizer_memory import kernels_of, optimizer_memory
from parallel.traits import TRAITS
from recipes.command import parse
from recipes.compare.job import run_job
from recipes.find import find_recipe
from recipes.launchers import default_num_processes, join_launcher
from recipes.ledger.report import dry_json, print_dry, print_ranks, ranks_json
from recipes.ledger.rows import lines
from recipes.messages import one_message
from recipes.recipe import Recipe
from recipes.terminal import open_console

WRONG = 3
"""Exit code where a prediction was further off than promised."""

MAX_WORLD_SIZE = 1 << 17
"""Ranks of the largest job that is looked at: enough for any there is; lists of ranks would take minutes beyond."""


@dataclass(frozen=True, kw_only=True)
class LedgerCommand:
    """What a recipe holds, sends and computes: predicted beside a real step on this machine.

    Tokens are made up, and come to each expert evenly. With `world_size` the real code builds the recipe as one rank of
    so many, in this process and without values, and a step is traced: nothing is computed, sent or allocated, whatever
    the size.

    Exit codes: 0 all predictions hold, model states and collectives to the byte, peaks within 3 % or as listed; 1 the
    recipe or the command line is wrong, or the step failed; 2 unknown options; 3 a prediction does not hold.

    Attributes:
        world_size: Ranks of a job to look at one rank of, without running it. None: a real step.
        rank: That rank.
        devices: GPUs of the one process of data_parallel='dp' in such a job.
        nproc: Ranks of the real step; default: one for each GPU, or 2 without any.
        optimizer: What takes the step; recipes train with AdamW.
        json: Print JSON.
        limit_s: Seconds after which the real step is ended.
        debug: Show the traceback of an error.
        recipe: What to train and how to split it.
    """

    world_size: int | None = None
    rank: int = 0
    devices: int = 1
    nproc: int | None = None
    optimizer: str = "adamw"
    json: bool = False
    limit_s: float = 600.0
    debug: bool = False
    recipe: Annotated[Recipe, tyro.conf.arg(name="")]

    def check(self) -> None:
        """Refuses what is out of range, and what would be ignored.

        Raises:
            ValueError: If something is.
        """
        optimizer_memory(self.optimizer)
        if not 0 < self.limit_s < float("inf"):
            raise ValueError(f"limit_s={self.limit_s} must be more than 0 s")
        if self.nproc is not None:
            check_integer("nproc", self.nproc, minimum=1)
        check_integer("devices", self.devices, minimum=1)
        if self.devices > 1 and not TRAITS[self.recipe.parallel.data_parallel].gathers_centrally:
            raise ValueError(
                f"devices={self.devices} is for data_parallel='dp', whose one process has several GPUs; every other "
                "backend takes a rank for each: say --world-size"
            )
        if self.world_size is None:
            for name in ("rank", "devices"):
                if getattr(self, name) != getattr(type(self), name):
                    value = getattr(self, name)
                    raise ValueError(f"{name}={value} is for a job that does not run; say --world-size too")
            return
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size={self.world_size} must be from 1 to {MAX_WORLD_SIZE:,}")
        if self.nproc is not None:
            raise ValueError(f"nproc={self.nproc} is for a real step, which --world-size does not take; leave one out")


def parse_ledger(words: list[str]) -> LedgerCommand:
    """Reads `RECIPE [options]`.

    Args:
        words: Of the command line.

    Raises:
        ValueError: If the first word is no recipe, or the recipe does not fit the ranks.
        SystemExit: After the help.
    """
    name = words[0] if words else "--help"
    options = words[1:]
    if name in ("-h", "--help"):
        name, options = "llama_debug", ["--help"]
    elif name.startswith("-"):
        raise ValueError(f"the first word must be a recipe, got {name!r}; usage: python -m recipes.ledger RECIPE")
    program = f"python -m recipes.ledger {name}"
    return parse(LedgerCommand, options, program, LedgerCommand(recipe=find_recipe(name)))


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: With one of the codes that the command documents.
    """
    words = sys.argv[1:] if arguments is None else arguments
    with one_message(debug="--debug" in words):
        command = parse_ledger(words)
        command.check()
        console = open_console(160)
        holds = _real(command, console) if command.world_size is None else _dry(command, command.world_size, console)
    sys.exit(0 if holds else WRONG)


def _real(command: LedgerCommand, console: Console) -> bool:
    if join_launcher():
        raise ValueError("ledger starts its own ranks; start it without a launcher")
    # Not at the top: ranks import it once they are forked, the help needs none of it.
    from recipes.ledger.measure import measure

    num_ranks = command.nproc or default_num_processes()
    command.recipe.check_step(num_ranks)
    kernels_of(command.optimizer, command.recipe.optimizer.implementation)
    outcome = run_job(measure, command.recipe, command.optimizer, num_processes=num_ranks, limit_s=command.limit_s)
    if outcome.failure is not None:
        raise ValueError(outcome.failure)
    ledgers = outcome.value
    if command.json:
        print(json.dumps(ranks_json(command.recipe, ledgers)))
    else:
        print_ranks(console, command.recipe, ledgers)
    return all(line.holds for each in ledgers for line in lines(each.predicted, each.traced))


def _dry(command: LedgerCommand, world_size: int, console: Console) -> bool:
    from recipes.ledger.dry import dry_ledger

    ledger = dry_ledger(command.recipe, world_size, command.rank, command.optimizer, command.devices)
    if command.json:
        print(json.dumps(dry_json(command.recipe, ledger)))
    else:
        print_dry(console, command.recipe, ledger)
    return ledger.traced is None or all(line.holds for line in lines(ledger.predicted, ledger.traced))


if __name__ == "__main__":
    main()
