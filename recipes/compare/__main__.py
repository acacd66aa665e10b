"""The command `python -m recipes.compare [RECIPE]`."""

import dataclasses
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from recipes.command import parse
from recipes.compare.job import run_job
from recipes.compare.layouts import Layout, default_layouts, read_layout, sweep_layouts
from recipes.compare.measure import MIN_STEPS, measure
from recipes.compare.report import write_report
from recipes.compare.rows import Row
from recipes.compare.tables import notes, summary
from recipes.data import load_dataset
from recipes.find import DEFAULT_RECIPE, find_recipe
from recipes.launchers import join_launcher
from recipes.messages import USER_ERROR, one_message
from recipes.recipe import Recipe
from recipes.terminal import open_console

RESIDUAL, FAILED = 3, 4
"""Exit codes where a prediction was wrong, and where a layout failed."""


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Runs one recipe under many layouts; shows what each of them sends, holds and takes, and what was predicted.

    A layout is named BACKEND[:STRATEGY][:FIELD=VALUE,...][@RANKS]: `ddp@4`, `fsdp2:full_shard:dp_shard=2,tp=2`,
    `ddp:bucket_cap_mb=1`, `fsdp2:shard_grad_op:compute=bfloat16,reduce=float32@2`. Fields are those of ParallelConfig
    and of its parts precision, sharding and buckets; ranks are the product of the degrees, or 2 where nothing says.

    A layout that fails, dies or hangs is a row with its reason. Exit codes: 0 all layouts ran and every prediction was
    right to the byte; 1 the command line or the recipe is wrong, or no layout ran; 2 unknown options; 3 a prediction
    was wrong; 4 some layout failed.

    Attributes:
        recipe: Name of the recipe, or path of a .py file.
        layouts: Layouts to compare; default: every backend and strategy that this machine can run, at 2 and 4 ranks.
        sweep: Compare over one knob instead, and draw step time and memory over it.
        steps: Steps of each layout; the last two are measured in detail and the first four warm up.
        global_batch: Sequences of a step.
        folder: Where report.md, report.json and pictures go.
        limit_s: Seconds after which a layout is ended.
        debug: Show the traceback of an error.
    """

    recipe: Annotated[str, tyro.conf.Positional] = DEFAULT_RECIPE
    layouts: tuple[str, ...] = ()
    sweep: Literal["bucket_cap_mb", "units", "prefetch", "reshard"] | None = None
    steps: int = 10
    global_batch: int = 8
    folder: str = "runs/compare"
    limit_s: float = 120.0
    debug: bool = False


def compare(command: CompareCommand, console: Console) -> list[Row]:
    """Runs every layout, one after the other; the first row is the one process that losses are compared with.

    Args:
        command: What was asked for.
        console: Where progress goes, a line a layout.

    Raises:
        ValueError: If the command contradicts itself, or names what is unknown.
    """
    if join_launcher():
        raise ValueError("compare starts its own ranks, other ones for each layout; start it without a launcher")
    if command.steps < MIN_STEPS:
        raise ValueError(f"steps={command.steps} must be at least {MIN_STEPS}: 4 to warm up, 1 to time, 2 to measure")
    if command.sweep is not None and command.layouts:
        raise ValueError("sweep names the layouts itself; give either --sweep or --layouts")
    recipe = _small(find_recipe(command.recipe), command.global_batch)
    layouts = _layouts(command, recipe)
    # Ranks then find the text in its cache.
    load_dataset(recipe.data)
    _import_for_ranks()
    rows: list[Row] = []
    for number, layout in enumerate(layouts, start=1):
        mine = dataclasses.replace(recipe, parallel=layout.config)
        outcome = run_job(measure, mine, command.steps, num_processes=layout.num_ranks, limit_s=command.limit_s)
        rows.append(Row(layout=layout, outcome=outcome))
        said = f"failed: {outcome.failure}" if outcome.failure else f"loss {outcome.value.losses[-1]:.4f}"
        console.print(f"{number}/{len(layouts)} {layout.name}: {said}, {outcome.time_s:.1f} s", soft_wrap=True)
    return rows


def _small(recipe: Recipe, global_batch: int) -> Recipe:
    """The recipe with the batch of a comparison."""
    micro_batch = min(recipe.training.micro_batch, global_batch)
    training = dataclasses.replace(recipe.training, global_batch=global_batch, micro_batch=micro_batch)
    return dataclasses.replace(recipe, training=training)


def _layouts(command: CompareCommand, recipe: Recipe) -> list[Layout]:
    """One process first, then what was asked for."""
    import torch

    if command.layouts:
        asked = [read_layout(text, recipe.parallel) for text in command.layouts]
    elif command.sweep is not None:
        asked = sweep_layouts(command.sweep, recipe)
    else:
        asked = default_layouts(recipe, torch.cuda.device_count() or None)
    reference = read_layout("none", recipe.parallel)
    return [reference, *(each for each in asked if each.name != reference.name)]


def _import_for_ranks() -> None:
    """Imports here, once, what each rank would import at its first step."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401


def _print_summary(console: Console, rows: list[Row]) -> None:
    words = summary(rows)
    table = Table(*words.columns, title=words.title, title_justify="left")
    for row in words.rows:
        table.add_row(*row)
    console.print(table)
    for note in notes(rows):
        console.print(note, soft_wrap=True)


def _exit_code(rows: list[Row]) -> int:
    failed = [row.layout.name for row in rows if row.report is None]
    if len(failed) == len(rows):
        return USER_ERROR
    return RESIDUAL if any(row.residual_bytes() for row in rows) else FAILED if failed else 0


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: With one of the codes that the command documents.
    """
    words = sys.argv[1:] if arguments is None else arguments
    with one_message(debug="--debug" in words):
        command = parse(CompareCommand, words, "python -m recipes.compare")
        # So that ranks are ended too.
        signal.signal(signal.SIGTERM, _stop)
        console = open_console(200)
        rows = compare(command, console)
        _print_summary(console, rows)
        folder = Path(command.folder)
        write_report(rows, folder, command=" ".join(["python -m recipes.compare", *words]), knob=command.sweep)
        console.print(f"wrote {folder / 'report.md'} and report.json", soft_wrap=True)
    sys.exit(_exit_code(rows))


def _stop(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
