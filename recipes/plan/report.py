"""Shows plans to people and gives them to programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from parallel.planner.candidate import Request
from parallel.planner.explain import Advice, advise, count_states, describe, what_binds, why_behind
from parallel.planner.guide import Walk, layer_figures
from parallel.planner.ranking import DOUBT, Plan
from parallel.planner.scaling import BEND, Curve
from parallel.planner.search import Found
from recipes.metrics import format_bytes
from recipes.plan.beside_ledger import Beside, rows
from recipes.plan.beside_ledger import table as table_beside
from recipes.plan.published import errors, read_rows, summary
from recipes.plan.tune import Measured


def show(model: str, found: Found, top: int, beside: Sequence[Beside]) -> None:
    """Prints plans and what is to be said of the best.

    Args:
        model: Name of the model.
        found: What a search found, one plan at least.
        top: Plans to show.
        beside: What planner and ledger say of the first plans.
    """
    best, request = found.plans[0], found.plans[0].request
    console = _console()
    console.print(
        f"{model} on {request.num_gpus} {request.gpu.name}: {request.global_batch} sequences of "
        f"{request.sequence_length} tokens a step; {found.num_degrees} ways to split, {found.num_evaluated} candidates "
        f"evaluated, {found.num_too_large} of them too large"
    )
    console.print(
        f"{format_bytes(round(request.usable_bytes))} of {format_bytes(round(request.gpu.memory_bytes))} may be used: "
        f"{request.headroom:.0%} is headroom"
    )
    console.print(_table(found.plans[:top]))
    doubted = dict.fromkeys(words for plan in found.plans[:top] for words in plan.unvalidated)
    if doubted:
        console.print(
            f"* unvalidated: no published result checks {'; '.join(doubted)}; ranked with an allowance of {DOUBT:.0%} "
            "for each such axis"
        )
    states = {name: format_bytes(round(size)) for name, size in count_states(best).items()}
    console.print(
        f"model states a GPU: {states['stored']} as stored here in float32, {states['classic']} in the classic float16 "
        "accounting; units in flight, activations and logits come on top"
    )
    console.print(_memory_of(best))
    if beside:
        console.print(table_beside(beside))
    console.print(f"what binds: {what_binds(best)}")
    if len(found.plans) > 1:
        console.print(f"why the second is behind: {why_behind(best, found.plans[1])}")
    for advice in advise(best):
        console.print(f"with {advice.change}: {_gain(best, advice)}")


def _memory_of(plan: Plan) -> str:
    """The parts of the peak, with the errors that such predictions have had."""
    memory = plan.memory
    parts = ("parameters", "gradients", "optimizer_state", "unsharded", "activations", "logits")
    words = [f"{name.replace('_', ' ')} {format_bytes(round(getattr(memory, name)))}" for name in parts]
    words.append(f"reserved beyond {format_bytes(round(memory.reserved - memory.allocated))}")
    words += [f"in host memory {format_bytes(round(memory.host))}"] if memory.host else []
    speed, worst_speed, of_memory, worst = summary([errors(row) for row in read_rows()])
    band = f"speed within {speed:.1%} of published results in the median, {worst_speed:.0%} at worst"
    band += f", memory {of_memory:.1%} and {worst:.0%}" if of_memory is not None else ""
    return f"peak of the best, {memory.moment}: {', '.join(words)}\npredictions for GPUs were {band}"


def show_walk(guide: Walk) -> None:
    """Prints the way through the guide by which people choose a layout.

    Args:
        guide: The answers.
    """
    console = _console()
    console.print("the guide by which people choose:")
    if guide.best is not None:
        console.print(f"  {'; '.join(layer_figures(guide.best.request))}")
    for each in guide.answers:
        needed = "no such layout is legal" if each.least_bytes is None else _needed(each.least_bytes, each.usable_bytes)
        console.print(f"  {each.question} {'yes' if each.is_yes else 'no'}: {each.choice}: {needed}")
    console.print(f"  {guide.verdict}")


def show_curves(curves: Sequence[Curve]) -> None:
    """Prints speed and memory over data-parallel ranks.

    Args:
        curves: One for each way of data parallelism.
    """
    console = _console()
    for curve in curves:
        bend = f"from {curve.bend} ranks on" if curve.bend is not None else "nowhere here"
        console.print(f"{curve.name}: latency of rings costs {BEND:.0%} of the speed {bend}")
        points = (
            f"{each.ranks}: {each.plan.tokens_per_s:,.0f} tokens/s, {format_bytes(round(each.plan.memory.reserved))}"
            for each in curve.points
        )
        console.print(f"  a GPU, by ranks: {'; '.join(points)}")


def show_measured(measured: Sequence[Measured]) -> None:
    """Prints what was predicted beside what was measured.

    Args:
        measured: The fastest first.
    """
    table = Table(box=None, pad_edge=False, title="measured on this machine", title_justify="left")
    for name in ("step", "predicted", "peak", "predicted peak", "layout"):
        table.add_column(name, justify="left" if name == "layout" else "right", overflow="fold")
    for each in measured:
        step = "failed" if each.step_s is None else f"{each.step_s:.3g} s"
        peak = "" if each.peak_bytes is None else format_bytes(each.peak_bytes)
        words = describe(each.plan) + (" (remembered)" if each.remembered else "")
        predicted = format_bytes(round(each.plan.memory.reserved))
        failure = f": {each.failure}" if each.failure else ""
        table.add_row(step, f"{each.plan.time.step_s:.3g} s", peak, predicted, words + failure)
    console = _console()
    console.print(table)
    if measured[0].step_s is not None:
        console.print(f"picked by measurement: {describe(measured[0].plan)}")


def as_json(
    model: str,
    found: Found,
    guide: Walk | None,
    curves: Sequence[Curve],
    measured: Sequence[Measured],
    beside: Sequence[Beside],
) -> dict[str, Any]:
    """The same for programs.

    Args:
        model: Name of the model.
        found: What a search found, one plan at least.
        guide: The way through the guide; None: it was not asked for.
        curves: Over data-parallel ranks.
        measured: What was measured.
        beside: What planner and ledger say of the first plans.
    """
    best = found.plans[0]
    values = {
        "model": model,
        "request": _request(best.request),
        "num_degrees": found.num_degrees,
        "num_evaluated": found.num_evaluated,
        "num_too_large": found.num_too_large,
        "what_binds": what_binds(best),
        "state_bytes": count_states(best),
        "plans": [
            _plan(plan) | {"why_behind": None if plan is best else why_behind(best, plan)} for plan in found.plans
        ],
        "advice": [advice._asdict() for advice in advise(best)],
        "beside_ledger": [
            {what: {"planner": ours, "ledger": exact} for what, ours, exact in rows(each)} for each in beside
        ],
    }
    if guide is not None:
        values["guide"] = {"answers": [each._asdict() for each in guide.answers], "verdict": guide.verdict}
    if curves:
        values["scaling"] = [_curve(curve) for curve in curves]
    if measured:
        values["measured"] = [
            {"layout": describe(each.plan), "predicted_step_s": each.plan.time.step_s}
            | {name: getattr(each, name) for name in ("step_s", "peak_bytes", "failure", "remembered", "tokens_per_s")}
            for each in measured
        ]
    return values


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "words": describe(plan),
        "layout": asdict(plan.candidate.layout()),
        "micro_batch": plan.candidate.micro_batch,
        "num_micro_batches": plan.candidate.num_micro_batches,
        "tokens_per_s_per_gpu": plan.tokens_per_s,
        "step_time_s": plan.time.step_s,
        "time": plan.time._asdict(),
        "memory": plan.memory._asdict() | {"allocated": plan.memory.allocated},
        "unvalidated": plan.unvalidated,
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "name": curve.name,
        "bend": curve.bend,
        "points": [
            {
                "ranks": each.ranks,
                "tokens_per_s_per_gpu": each.plan.tokens_per_s,
                "reserved_bytes": each.plan.memory.reserved,
                "latency_share": each.latency_share,
            }
            for each in curve.points
        ],
    }


def _needed(least: float, usable: float) -> str:
    words = f"{format_bytes(round(least))} at least, {format_bytes(round(usable))} may be used"
    return words if least <= usable else f"{words}, {format_bytes(round(least - usable))} short"


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _request(request: Request) -> dict[str, Any]:
    return asdict(request) | {"usable_bytes": request.usable_bytes}


def _table(plans: Sequence[Plan]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("tokens/s a GPU", "step", "peak", "at"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("micro-batches", justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for plan in plans:
        candidate = plan.candidate
        table.add_row(
            f"{plan.tokens_per_s:,.0f}{'*' if plan.unvalidated else ' '}",
            f"{plan.time.step_s:.3g} s",
            format_bytes(round(plan.memory.reserved)),
            plan.memory.moment,
            f"{candidate.num_micro_batches} x {candidate.micro_batch}",
            describe(plan),
        )
    return table


def _gain(best: Plan, advice: Advice) -> str:
    return f"{advice.tokens_per_s:,.0f} tokens/s a GPU ({advice.tokens_per_s / best.tokens_per_s - 1:+.1%})"
