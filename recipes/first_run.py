"""The first run: trains on one mesh, resumes on another, and samples text: `make train`."""

import dataclasses
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from parallel import ParallelConfig
from recipes.command import parse
from recipes.data import load_dataset, text_entropy
from recipes.find import find_recipe
from recipes.folder_lock import LOCK_NAME
from recipes.from_checkpoint import find_checkpoint
from recipes.generate import GenerateCommand, print_sample
from recipes.launch import run
from recipes.launchers import join_launcher, world_size_to_come
from recipes.messages import one_message
from recipes.metrics import format_bytes
from recipes.recipe import Recipe
from recipes.run_log import TrainSummary
from recipes.train import train


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """Trains a recipe on a mesh of fully_shard, resumes it on one of tensor parallel, and samples text.

    Attributes:
        recipe: Name of the recipe.
        steps: Optimizer steps of both legs together; default: those of the recipe.
        switch_step: Optimizer steps of the first leg; the second does the rest.
        folder: Where to write; what an earlier first run left there is removed.
        nproc: Ranks to start on this machine; default: one for each GPU, or 2 without any.
        debug: Show the traceback of an error.
    """

    recipe: str = "llama_debug"
    steps: int | None = None
    switch_step: int = 200
    folder: str = "runs/first_run"
    nproc: int | None = None
    debug: bool = False


def first_run(command: FirstRun) -> None:
    """Runs both legs and reports on them.

    Args:
        command: What to run.

    Raises:
        ValueError: If the recipe does not fit, or the folder holds something else.
        SystemExit: If a leg fails.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    if join_launcher():
        raise ValueError("the first run starts its own ranks twice; start it without a launcher")
    world_size = world_size_to_come(command.nproc)
    legs = _legs(command, world_size)
    for recipe in legs:
        recipe.check(world_size)
    _clear(Path(command.folder))
    summaries: list[TrainSummary] = []
    for number, recipe in enumerate(legs, start=1):
        console.rule(f"leg {number} of {len(legs)}")
        summaries.append(run(train, recipe, num_processes=command.nproc, debug=command.debug))
    console.print(_table(summaries))
    console.print(_yardstick(legs[0], summaries[-1].held_out_loss))
    console.rule("a sample")
    prompt = GenerateCommand(checkpoint=find_checkpoint(legs[-1].output.folder), prompt="def ", num_tokens=240)
    run(print_sample, prompt, legs[-1], num_processes=command.nproc, debug=command.debug)


def _legs(command: FirstRun, world_size: int) -> list[Recipe]:
    base = find_recipe(command.recipe)
    output = dataclasses.replace(base.output, folder=command.folder)
    steps = base.training.steps if command.steps is None else command.steps
    base = dataclasses.replace(base, output=output, training=dataclasses.replace(base.training, steps=steps))
    if not 0 < command.switch_step < steps:
        raise ValueError(f"switch_step={command.switch_step} must lie within the {steps} steps of the run")
    first = dataclasses.replace(base.training, stop_at=command.switch_step)
    tp = 2 if world_size % 2 == 0 else 1
    return [
        dataclasses.replace(base, training=first, parallel=ParallelConfig()),
        dataclasses.replace(base, parallel=ParallelConfig(tp=tp)),
    ]


def _yardstick(recipe: Recipe, held_out_loss: float | None) -> str:
    """What the simplest models would lose, beside what this one does; never a reason to lose a finished run."""
    loss = "nothing is held out" if held_out_loss is None else f"held-out loss {held_out_loss:.3f}"
    try:
        entropy = text_entropy(load_dataset(recipe.data).train)
    except ValueError as error:
        return f"{loss}; no entropies to compare with: {error}"
    return (
        f"training text: unigram entropy {entropy.unigram:.3f}, bigram entropy {entropy.bigram:.3f} nats a byte; {loss}"
    )


def _clear(folder: Path) -> None:
    """Removes what an earlier first run left."""
    own = {"checkpoints", "metrics.jsonl", LOCK_NAME}
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is no folder; name another one")
    foreign = sorted({each.name for each in folder.iterdir()} - own) if folder.is_dir() else []
    if foreign:
        raise ValueError(
            f"{str(folder)!r} holds {', '.join(foreign[:3])}, which no first run wrote; name another folder"
        )
    if folder.exists():
        shutil.rmtree(folder)


def _table(summaries: list[TrainSummary]) -> Table:
    names = (
        "mesh",
        "steps",
        "loss at start",
        "loss at end",
        "held-out loss",
        "tokens/s",
        "peak memory",
        "load",
        "save",
    )
    table = Table(*names, title="both legs; losses in nats a byte, memory of the fullest process")
    for each in summaries:
        table.add_row(
            each.mesh,
            f"{each.first_step} to {each.last_step}",
            f"{each.first_loss:.3f}",
            f"{each.last_loss:.3f}",
            "-" if each.held_out_loss is None else f"{each.held_out_loss:.3f}",
            f"{each.tokens_per_s:,.0f}",
            format_bytes(each.peak_bytes),
            "-" if each.load_s is None else f"{each.load_s:.2f} s",
            f"{each.save_s:.2f} s",
        )
    return table


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.
    """
    with one_message(debug="--debug" in (sys.argv if arguments is None else arguments)):
        first_run(parse(FirstRun, arguments, "python -m recipes.first_run"))


if __name__ == "__main__":
    main()
