"""Draws a comparison: memory and traffic by kind, the course of a step, and figures over a knob."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parallel.ledger.states import Moments
from parallel.ledger.timeline import Timeline
from recipes.compare.rows import HELD, MOMENTS, Row, TrafficRow, held_bytes, step_time_s

MIB = 2**20
LABELLED_SHARE = 0.06
"""A part of a step that takes less of it has no room for its name."""

COLORS = {
    "all_gather": "tab:blue",
    "reduce_scatter": "tab:orange",
    "all_reduce": "tab:green",
    "broadcast": "tab:purple",
    "all_to_all": "tab:red",
}


def draw(rows: Sequence[Row], folder: Path) -> dict[str, str]:
    """Draws memory, traffic, and the course of a step of each layout that ran.

    Args:
        rows: The comparison.
        folder: Where to write.

    Returns:
        Names of the files, by `memory`, `traffic` and name of the layout.
    """
    done = [(row, row.report) for row in rows if row.report is not None]
    files = {"memory": "memory.png", "traffic": "traffic.png"}
    names = [row.layout.name for row, _ in done]
    draw_memory = [functools.partial(_memory, report.ranks[0].states) for _, report in done]
    draw_traffic = [functools.partial(_traffic, row.traffic()) for row, _ in done]
    _bars(names, draw_memory, folder / files["memory"], "MiB that rank 0 holds: at rest, after forward, after backward")
    _bars(names, draw_traffic, folder / files["traffic"], "MiB that rank 0 sends in a step, around rings")
    for row, report in done:
        name = row.layout.name
        files[name] = f"timeline-{re.sub('[^A-Za-z0-9_.]', '-', name)}.png"
        _draw_timeline(name, report.ranks[0].timeline, folder / files[name])
    return files


def draw_sweep(knob: str, rows: Sequence[Row], folder: Path) -> str:
    """Draws step time and memory over a knob.

    Args:
        knob: Its name.
        rows: Layouts in which it differs.
        folder: Where to write.

    Returns:
        Name of the file.
    """
    plt = _pyplot()
    done = [(row.layout.name, row.report) for row in rows if row.report is not None]
    labels = [re.sub("([:,=])", r"\1\n", name) for name, _ in done]
    times_ms = [step_time_s(report) * 1e3 for _, report in done]
    held = [max(held_bytes(getattr(report.ranks[0].states, each)) for each in MOMENTS) / MIB for _, report in done]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(2 + 1.5 * len(done), 6), layout="constrained")
    above.bar(labels, times_ms, color="tab:gray")
    above.set_ylabel("ms a step")
    below.bar(labels, held, color="tab:blue")
    below.set_ylabel("MiB held at most,\nactivations excluded")
    figure.suptitle(f"sweep of {knob}")
    figure.savefig(folder / "sweep.png", dpi=100)
    plt.close(figure)
    return "sweep.png"


def _pyplot() -> Any:
    """Matplotlib's drawing functions, without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _bars(names: Sequence[str], fill: Sequence[Callable[[Any, int], None]], path: Path, title: str) -> None:
    """A place for each layout, in which `fill` draws horizontal bars, stacked by kind."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.45 * len(names)), layout="constrained")
    for place, each in enumerate(fill):
        each(axes, place)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    _legend(axes)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _memory(states: Moments, axes: Any, place: int) -> None:
    for number, moment in enumerate(MOMENTS):
        left = 0.0
        for color, kind in enumerate(HELD):
            size = getattr(getattr(states, moment), kind) / MIB
            axes.barh(place + (number - 1) * 0.27, size, 0.25, left=left, color=f"C{color}", label=kind)
            left += size


def _traffic(sent: Sequence[TrafficRow], axes: Any, place: int) -> None:
    left = 0.0
    for each in sent:
        size = each.wire_bytes / MIB
        axes.barh(place, size, 0.7, left=left, color=COLORS.get(each.kind, "gray"), label=each.kind, edgecolor="white")
        left += size


def _draw_timeline(name: str, timeline: Timeline, path: Path) -> None:
    """A step: its parts at the bottom, above them the collectives under way by view, and when the rank waits."""
    plt = _pyplot()
    zero_s = timeline.step.start_s
    views = list(dict.fromkeys(each.view for each in timeline.collectives))
    figure, axes = plt.subplots(figsize=(11, 1.6 + 0.6 * len(views)), layout="constrained")
    for part, span in timeline.parts:
        start_ms, length_ms = _interval(span.start_s, span.end_s, zero_s)
        axes.broken_barh([(start_ms, length_ms)], (0, 0.8), color="lightgray", edgecolor="black")
        if length_ms > LABELLED_SHARE * (timeline.step.end_s - zero_s) * 1e3:
            axes.text(start_ms + length_ms / 2, 0.4, part, ha="center", va="center", fontsize=8)
    lanes: dict[str, list[float]] = {view: [] for view in views}
    for each in timeline.collectives:
        end_s = each.end_s or each.start_s
        # Those that are under way together lie side by side.
        height = 1 + views.index(each.view) + 0.25 * (_lane(lanes[each.view], each.start_s, end_s) % 3)
        color = COLORS.get(each.kind, "gray")
        axes.broken_barh([_interval(each.start_s, end_s, zero_s)], (height, 0.22), color=color, label=each.kind)
    waits = [_interval(span.start_s, span.end_s, zero_s) for span in timeline.waits]
    axes.broken_barh(waits, (1 + len(views), 0.8), color="black")
    axes.set_yticks([each + 0.4 for each in range(len(views) + 2)], ["rank 0", *views, "waits"])
    axes.set_xlabel("ms")
    axes.set_title(name, fontsize=10)
    _legend(axes)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _legend(axes: Any) -> None:
    """Each label once, outside of the picture."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _lane(ends: list[float], start_s: float, end_s: float) -> int:
    """The first lane in which nothing is under way any more."""
    for lane, busy_until_s in enumerate(ends):
        if busy_until_s <= start_s:
            ends[lane] = end_s
            return lane
    ends.append(end_s)
    return len(ends) - 1


def _interval(start_s: float, end_s: float, zero_s: float) -> tuple[float, float]:
    """Start and length in milliseconds."""
    return (start_s - zero_s) * 1e3, (end_s - start_s) * 1e3
