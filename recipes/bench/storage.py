"""Runs all measures of saving and loading, each figure beside what is aimed at."""

import tempfile
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from recipes.bench import background, checkpoint, hub, plan
from recipes.bench.aims import Aim, aims_table
from recipes.bench.rounds import Comparison
from recipes.launch import run
from recipes.metrics import format_bytes

PARTS = ("save", "load_cold", "load_warm", "stall", "background", "bytes", "memory", "import", "plan")


def bench_storage(
    parts: Collection[str], num_rounds: int, folder: str | None, console: Console, *, debug: bool
) -> list[dict[str, object]]:
    """Measures saving and loading with 1 and 2 ranks; prints a table for each comparison, and last one of all aims.

    Args:
        parts: Those of `PARTS` that are asked for.
        num_rounds: Interleaved rounds of each comparison.
        folder: Folder on the disk to measure; None: that of temporary files.
        console: Where to print.
        debug: Show the traceback of an error.

    Returns:
        All figures, as JSON can hold them.
    """
    results: list[dict[str, object]] = []
    aims: list[Aim] = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for num_ranks in (1, 2):
            for part, (compare, judge) in COMPARISONS.items():
                if part in parts:
                    comparison = run(compare, num_rounds, place, num_processes=num_ranks, debug=debug)
                    console.print(comparison.table())
                    results.append(comparison.to_json())
                    aims += judge(comparison)
            for part, measure in MEASURES.items():
                if part in parts:
                    aims += run(measure, place, num_processes=num_ranks, debug=debug)
    if "import" in parts:
        aims += _bench_import(num_rounds, folder, console, results, debug=debug)
    if "plan" in parts:
        aims += plan.plan_of_many_ranks()
    console.print(aims_table(aims))
    return [*results, *(each.to_json() for each in aims)]


def _beside_torch(comparison: Comparison, limit: str = "") -> Aim:
    ratio = comparison.ratio(checkpoint.OURS)
    return Aim(what=f"{comparison.title}: time, of torch's{limit}", value=ratio, limit=checkpoint.AIM)


def _beside_plain(comparison: Comparison, *, limit: float) -> list[Aim]:
    """Ours beside torch's, and beside the fastest of the plain ways, which no format can beat."""
    plain = [name for name in comparison.times_s if name not in (checkpoint.TORCH, checkpoint.OURS)]
    fastest = min(plain, key=comparison.median_s)
    speed = comparison.ratio(fastest, to=checkpoint.OURS)
    return [
        _beside_torch(comparison, f" ({fastest}: {comparison.ratio(fastest):.3f})"),
        Aim(what=f"{comparison.title}: speed, of a {fastest}", value=speed, limit=limit, at_least=True),
    ]


def _stall(comparison: Comparison) -> list[Aim]:
    ratio = comparison.ratio(background.OURS)
    return [Aim(what=f"{comparison.title}: time, of a plain copy's", value=ratio, limit=background.STALL_AIM)]


def _lost(comparison: Comparison) -> list[Aim]:
    what = f"{comparison.title}: training time lost, of what torch's save costs"
    return [Aim(what=what, value=background.lost_share(comparison), limit=background.LOST_AIM)]


Compare = Callable[[int, str], Comparison]
Judge = Callable[[Comparison], Sequence[Aim]]
COMPARISONS: dict[str, tuple[Compare, Judge]] = {
    "save": (checkpoint.compare_save, partial(_beside_plain, limit=0.85)),
    "load_cold": (
        partial(checkpoint.compare_load, cold=True),
        partial(_beside_plain, limit=0.9),
    ),
    "load_warm": (partial(checkpoint.compare_load, cold=False), lambda comparison: [_beside_torch(comparison)]),
    "stall": (background.compare_stall, _stall),
    "background": (background.compare_training, _lost),
}
"""Part -> what is timed side by side, and the figures that follow."""
MEASURES: dict[str, Callable[[str], Sequence[Aim]]] = {
    "bytes": checkpoint.bytes_moved,
    "memory": checkpoint.memory_of_save_and_load,
}
"""Part -> what is measured alone."""


def _bench_import(
    num_rounds: int, folder: str | None, console: Console, results: list[dict[str, object]], *, debug: bool
) -> list[Aim]:
    aims: list[Aim] = []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = str(Path(place) / "hub")
        run(hub.write_folder, path, num_processes=1, debug=debug)
        for num_ranks in (1, 2):
            for cold in (True, False):
                comparison, memory = hub.compare_import(num_rounds, path, num_ranks, cold=cold)
                console.print(comparison.table())
                listed = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in memory.items())
                console.print(f"peak memory of rank 0 beside its libraries: {listed}\n")
                results.append(comparison.to_json() | {"peak_bytes": memory})
                ratio, theirs = comparison.ratio(hub.OURS), memory[hub.THEIRS]
                aims += [
                    Aim(what=f"{comparison.title}: time, of theirs", value=ratio, limit=hub.AIM),
                    Aim(what=f"{comparison.title}: memory", value=memory[hub.OURS], limit=theirs, unit="bytes"),
                ]
    return aims
