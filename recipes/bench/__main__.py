"""The command `python -m recipes.bench step | checkpoint`."""

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from recipes.bench import startup, step, storage
from recipes.bench.model import compare_models, peak_memory
from recipes.bench.rounds import Comparison
from recipes.bench.storage import bench_storage
from recipes.command import parse
from recipes.launch import run
from recipes.messages import one_message
from recipes.metrics import format_bytes
from recipes.terminal import open_console

What = Literal["step", "checkpoint"]
PARTS: Mapping[What, tuple[str, ...]] = {
    "step": ("full_shard", "replicated", "tensor_parallel", "model", "memory", "start"),
    "checkpoint": storage.PARTS,
}
ROUNDS: Mapping[What, int] = {"step": 15, "checkpoint": 5}


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Measures our own code side by side with others; give it a machine that does nothing else.

    Attributes:
        what: What to measure: `step`, the time and memory of a training step and of starting one; `checkpoint`, of
            saving and loading 1 GB and importing as much.
        parts: Which comparisons to make: `full_shard`, `replicated`, `tensor_parallel`, `model`, `memory`, `start` of
            a step, `save`, `load_cold`, `load_warm`, `stall`, `background`, `bytes`, `memory`, `import`, `plan` of a
            checkpoint. None: all.
        rounds: Interleaved rounds of each comparison. None: 15 of steps, 5 of checkpoints, which take 12 minutes.
        folder: Folder on the disk to measure, with 5 GB free; what it holds stays. None: that of temporary files.
        json: File to write all figures to; None: none.
        debug: Show the traceback of an error.
    """

    what: Annotated[What, tyro.conf.Positional]
    parts: tuple[str, ...] | None = None
    rounds: int | None = None
    folder: str | None = None
    json: str | None = None
    debug: bool = False

    def check(self) -> None:
        """Refuses what cannot be measured.

        Raises:
            ValueError: If there is no such part, or too few rounds.
        """
        if self.num_rounds < 2:
            raise ValueError(f"rounds={self.rounds} must be at least 2, for there to be a spread")
        legal = ", ".join(PARTS[self.what])
        if self.parts == ():
            raise ValueError(f"parts is empty; legal: {legal}")
        unknown = [part for part in self.parts or () if part not in PARTS[self.what]]
        if unknown:
            raise ValueError(f"{self.what} has no parts {', '.join(unknown)}; legal: {legal}")

    @property
    def num_rounds(self) -> int:
        """Rounds of each comparison."""
        return self.rounds if self.rounds is not None else ROUNDS[self.what]

    def measures(self, part: str) -> bool:
        """Whether a comparison is to be made."""
        return self.parts is None or part in self.parts


def bench_step(command: BenchCommand, console: Console) -> list[dict[str, object]]:
    """Measures the step in the comparisons asked for and prints a table for each.

    Args:
        command: What was asked for.
        console: Where to print.

    Returns:
        All figures, as JSON can hold them.
    """
    comparisons: dict[str, tuple[Callable[[int], Comparison], int]] = {
        "full_shard": (step.compare_full_shard, 2),
        "replicated": (step.compare_replicated, 2),
        "tensor_parallel": (step.compare_tensor_parallel, 2),
        "model": (compare_models, 1),
    }
    results: list[dict[str, object]] = []
    for part, (compare, num_processes) in comparisons.items():
        if command.measures(part):
            comparison = run(compare, command.num_rounds, num_processes=num_processes, debug=command.debug)
            console.print(comparison.table())
            results.append(comparison.to_json())
    if command.measures("memory"):
        results.append(_bench_memory(console))
    if command.measures("start"):
        results.append(_bench_start(command.num_rounds, console))
    return results


def bench_checkpoint(command: BenchCommand, console: Console) -> list[dict[str, object]]:
    """Measures saving and loading with 1 and 2 ranks and prints a table for each comparison, and one of all aims.

    Args:
        command: What was asked for.
        console: Where to print.

    Returns:
        All figures, as JSON can hold them.
    """
    parts = storage.PARTS if command.parts is None else command.parts
    return bench_storage(parts, command.num_rounds, command.folder, console, debug=command.debug)


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
        command = parse(BenchCommand, arguments, "python -m recipes.bench")
        command.check()
        bench = bench_step if command.what == "step" else bench_checkpoint
        results = bench(command, open_console(120))
        if command.json is not None:
            Path(command.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
