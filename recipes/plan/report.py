"""Shows plans to people and gives them to programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from parallel.planner.candidate import Request
from parallel.planner.explain import Advice, advise, count_states, describe, what_binds, why_behind
from parallel.planner.search import Found, Plan
from recipes.metrics import format_bytes


def show(model: str, found: Found) -> None:
    """Prints plans and what is to be said of the best.

    Args:
        model: Name of the model.
        found: What a search found, one plan at least.
    """
    best, request = found.plans[0], found.plans[0].request
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{model} on {request.num_gpus} {request.gpu.name}: {request.global_batch} sequences of "
        f"{request.sequence_length} tokens a step; {found.num_degrees} ways to split, {found.num_evaluated} candidates "
        f"evaluated, {found.num_too_large} of them too large"
    )
    console.print(
        f"{format_bytes(round(request.usable_bytes))} of {format_bytes(round(request.gpu.memory_bytes))} may be used: "
        f"{request.headroom:.0%} is headroom"
    )
    console.print(_table(found.plans))
    console.print("* has terms that no published result checks; ranked with an allowance of 5 % for each such axis")
    states = {name: format_bytes(round(size)) for name, size in count_states(best).items()}
    console.print(
        f"model states a GPU: {states['stored']} as stored here in float32, {states['classic']} in the classic float16 "
        "accounting; units in flight, activations and logits come on top"
    )
    console.print(f"what binds: {what_binds(best)}")
    if len(found.plans) > 1:
        console.print(f"why the second is behind: {why_behind(best, found.plans[1])}")
    for advice in advise(best):
        console.print(f"with {advice.change}: {_gain(best, advice)}")


def as_json(model: str, found: Found) -> dict[str, Any]:
    """The same for programs.

    Args:
        model: Name of the model.
        found: What a search found, one plan at least.
    """
    best = found.plans[0]
    return {
        "model": model,
        "request": _request(best.request),
        "num_degrees": found.num_degrees,
        "num_evaluated": found.num_evaluated,
        "num_too_large": found.num_too_large,
        "what_binds": what_binds(best),
        "state_bytes": count_states(best),
        "plans": [
            {
                "layout": asdict(plan.candidate.layout()),
                "micro_batch": plan.candidate.micro_batch,
                "num_micro_batches": plan.candidate.num_micro_batches,
                "tokens_per_s_per_gpu": plan.tokens_per_s,
                "step_time_s": plan.time.step_s,
                "time": plan.time._asdict(),
                "memory": plan.memory._asdict() | {"allocated": plan.memory.allocated},
                "unvalidated": plan.unvalidated,
                "why_behind": None if plan is best else why_behind(best, plan),
            }
            for plan in found.plans
        ],
        "advice": [advice._asdict() for advice in advise(best)],
    }


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
