"""The command `python -m recipes.bench step`."""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro
from rich.console import Console
from rich.table import Table

from recipes.bench import startup, step
from recipes.bench.model import compare_models, peak_memory
from recipes.bench.rounds import Comparison
from recipes.launch import run
from recipes.messages import one_message
from recipes.metrics import format_bytes

Part = Literal["full_shard", "replicated", "tensor_parallel", "model", "memory", "start"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Measures our own code side by side with others; give it a machine that does nothing else.

    Attributes:
        what: What to measure: `step`, the time and memory of a training step and of starting one.
        parts: Which comparisons to make.
        rounds: Interleaved rounds of each comparison.
        json: File to write all figures to; None: none.
        debug: Show the traceback of an error.
    """

    what: Annotated[Literal["step"], tyro.conf.Positional]
    parts: tuple[Part, ...] = PARTS
    rounds: int = 15
    json: str | None = None
    debug: bool = False


def bench_step(command: BenchCommand, console: Console) -> list[dict[str, object]]:
    """Measures the step in the comparisons asked for and prints a table for each.

    Args:
        command: What was asked for.
        console: Where to print.

    Returns:
        All figures, as JSON can hold them.
    """
    comparisons: dict[Part, tuple[Callable[[int], Comparison], int]] = {
        "full_shard": (step.compare_full_shard, 2),
        "replicated": (step.compare_replicated, 2),
        "tensor_parallel": (step.compare_tensor_parallel, 2),
        "model": (compare_models, 1),
    }
    results: list[dict[str, object]] = []
    for part, (compare, num_processes) in comparisons.items():
        if part in command.parts:
            comparison = run(compare, command.rounds, num_processes=num_processes, debug=command.debug)
            console.print(comparison.table())
            results.append(comparison.to_json())
    if "memory" in command.parts:
        results.append(_bench_memory(console))
    if "start" in command.parts:
        results.append(_bench_start(command.rounds, console))
    return results


def _bench_memory(console: Console) -> dict[str, object]:
    memory = peak_memory()
    theirs, ours = memory.values()
    console.print(
        f"peak memory of that step beyond the model's own: transformers {format_bytes(theirs)}, ours "
        f"{format_bytes(ours)}, ratio {ours / theirs:.2f} (aim: <= 0.80)\n"
    )
    return {"peak_bytes": memory}


def _bench_start(num_rounds: int, console: Console) -> dict[str, object]:
    imports = startup.import_times_s(num_rounds)
    first_steps = startup.first_step_times_s(max(1, num_rounds // 3))
    table = Table("starting", "median s of the first", "median s more for ours", "aim", title="start-up")
    for times, aim in ((imports, 0.1), (first_steps, 2.0)):
        theirs_name, ours_name = times
        more = startup.median_difference_s(times)
        table.add_row(
            f"{theirs_name} / {ours_name}",
            f"{statistics.median(times[theirs_name]):.2f}",
            f"{more:+.2f}",
            f"<= {aim:+.2f}",
        )
    console.print(table)
    return {"import_s": imports, "first_step_s": first_steps}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.
    """
    debug = "--debug" in (sys.argv if arguments is None else arguments)
    with one_message(debug=debug):
        command = tyro.cli(BenchCommand, args=arguments, prog="python -m recipes.bench")
        if command.rounds < 2:
            raise ValueError(f"rounds={command.rounds} must be at least 2, for there to be a spread")
        if not command.parts:
            raise ValueError(f"parts is empty; legal: {', '.join(PARTS)}")
        console = Console(highlight=False)
        results = bench_step(command, console if console.is_terminal else Console(highlight=False, width=120))
        if command.json is not None:
            Path(command.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
