"""Draws plans: memory against speed, and both over data-parallel ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel.planner.explain import describe
from parallel.planner.ranking import Plan
from parallel.planner.scaling import BEND, Curve

GIB = 2**30


def draw_frontier(model: str, best: Sequence[Plan], others: Sequence[Plan], path: str) -> None:
    """Draws memory against speed.

    Args:
        model: Name of the model.
        best: Plans of which none is faster with as little memory.
        others: Plans beside them.
        path: File to write.

    Raises:
        OSError: If it cannot be written.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    request = best[0].request
    for plans, marker, name in ((others, "x", "other ways to split"), (best, "o", "frontier")):
        memory, speed = [each.memory.reserved / GIB for each in plans], [each.tokens_per_s for each in plans]
        axes.plot(memory, speed, marker, linestyle="-" if marker == "o" else "", label=name)
    for number, plan in enumerate(best, start=1):
        axes.annotate(
            str(number), (plan.memory.reserved / GIB, plan.tokens_per_s), xytext=(4, 4), textcoords="offset points"
        )
    axes.axvline(request.usable_bytes / GIB, color="gray", linestyle="--", label="may be used")
    axes.set_xlabel("GiB of a GPU, predicted peak")
    axes.set_ylabel("tokens/s of a GPU, predicted")
    axes.set_title(f"{model} on {request.num_gpus} {request.gpu.name}", fontsize=10)
    words = "\n".join(f"{number}: {describe(plan)}" for number, plan in enumerate(best, start=1))
    axes.text(0.0, -0.13, words, transform=axes.transAxes, fontsize=7, va="top")
    axes.legend(fontsize=8)
    _save(plt, figure, path)


def draw_scaling(model: str, curves: Sequence[Curve], path: str) -> None:
    """Draws speed and memory over data-parallel ranks, with the point where latency bends each curve.

    Args:
        model: Name of the model.
        curves: What to draw.
        path: File to write.

    Raises:
        OSError: If it cannot be written.
    """
    plt = _pyplot()
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(9, 8), layout="constrained")
    for number, curve in enumerate(curves):
        ranks, plans = [each.ranks for each in curve.points], [each.plan for each in curve.points]
        above.plot(ranks, [each.tokens_per_s for each in plans], "o-", color=f"C{number}", label=curve.name)
        below.plot(ranks, [each.memory.reserved / GIB for each in plans], "o-", color=f"C{number}", label=curve.name)
        if curve.bend is not None:
            label = f"{curve.name}: latency costs {BEND:.0%} from {curve.bend} ranks on"
            above.axvline(curve.bend, color=f"C{number}", linestyle=":", label=label)
    above.set_xscale("log", base=2)
    above.set_xticks(sorted({each.ranks for curve in curves for each in curve.points}))
    above.xaxis.set_major_formatter("{x:.0f}")
    above.set_ylim(bottom=0)
    above.set_ylabel("tokens/s of a GPU, predicted")
    below.set_ylabel("GiB of a GPU, predicted peak")
    below.set_xlabel("data-parallel ranks")
    above.set_title(f"{model}: as many sequences on each rank", fontsize=10)
    above.legend(fontsize=8)
    _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def _pyplot() -> Any:
    """Matplotlib's drawing functions, without a screen."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("pictures need matplotlib; install meshwright[plots]") from error

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
