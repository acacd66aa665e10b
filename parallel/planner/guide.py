"""Walks the guide by which people choose a layout, with a request's numbers, and says where the planner differs."""

from collections.abc import Iterator
from typing import NamedTuple

from parallel.planner.bounds import Degrees, Kind
from parallel.planner.candidate import Request
from parallel.planner.costs import model_costs
from parallel.planner.explain import PARTS, describe, why_behind
from parallel.planner.ranking import Plan
from parallel.planner.search import Allows, search, smallest
from parallel.traits import TRAITS

CLOSE = 0.02
"""Plans whose times differ by less than this are as good as each other."""


class Rule(NamedTuple):
    """A branch of the guide.

    Attributes:
        question: What it asks.
        choice: What it says where the answer is yes.
        allows: The layouts that are that choice.
    """

    question: str
    choice: str
    allows: Allows


class Answer(NamedTuple):
    """What a request answers.

    Attributes:
        question: The question.
        choice: What yes means.
        least_bytes: What the smallest such layout needs of a GPU; None: none is legal.
        usable_bytes: What a GPU has.
        is_yes: The answer.
    """

    question: str
    choice: str
    least_bytes: float | None
    usable_bytes: float
    is_yes: bool


class Walk(NamedTuple):
    """The way through the guide.

    Attributes:
        answers: In the order of the questions, to the first yes.
        choice: What the guide says; None: it has no answer.
        chosen: The best plan that is it.
        best: The best plan of all.
        verdict: Where the planner differs, and why.
    """

    answers: tuple[Answer, ...]
    choice: str | None
    chosen: Plan | None
    best: Plan | None
    verdict: str


def rules(request: Request) -> tuple[Rule, ...]:
    """The guide in the order in which it asks.

    Args:
        request: What is to be trained on what.
    """
    node = request.gpu.gpus_per_node
    several = request.num_gpus > node

    def plain(degrees: Degrees, kind: Kind) -> bool:
        return degrees.tp == degrees.pp == degrees.cp == 1 and not kind.offloads

    def replicates(degrees: Degrees, kind: Kind) -> bool:
        return plain(degrees, kind) and not TRAITS[kind.data_parallel].shards

    def in_node(degrees: Degrees, kind: Kind) -> bool:
        return plain(degrees, kind) and kind.strategy == "hybrid_shard" and degrees.dp_shard == node

    def full(degrees: Degrees, kind: Kind) -> bool:
        return plain(degrees, kind) and kind.strategy == "full_shard"

    def with_tp(degrees: Degrees, kind: Kind) -> bool:
        sharded = kind.strategy == "full_shard" and not kind.offloads
        return sharded and degrees.pp == degrees.cp == 1 and 1 < degrees.tp <= node

    def with_pp(degrees: Degrees, kind: Kind) -> bool:
        return kind.strategy in ("full_shard", None) and not kind.offloads and degrees.pp > 1 and degrees.tp <= node

    found = [
        Rule("does it fit on one GPU?", "ddp", replicates),
        Rule(
            "is it only a little short, so that sharded gradients and optimizer state help?",
            "shard_grad_op",
            lambda degrees, kind: plain(degrees, kind) and kind.strategy == "shard_grad_op",
        ),
        Rule("far short: does it fit with parameters sharded over all?", "full_shard", full),
        Rule("is one layer too large, but not its part in a node?", "full_shard with tp", with_tp),
        Rule("and if layers are shared out too?", "tp and pp", with_pp),
    ]
    if several:
        found.insert(2, Rule("several machines: does one of them hold it?", "hybrid_shard", in_node))
    return tuple(found)


def walk(request: Request) -> Walk:
    """Answers the questions of the guide and holds its choice against the best plan.

    Args:
        request: What is to be trained on what.
    """
    answers: list[Answer] = []
    best = next(iter(search(request, most=1).plans), None)
    for rule in rules(request):
        least = smallest(request, allows=rule.allows)
        chosen = next(iter(search(request, most=1, allows=rule.allows).plans), None)
        reserved = None if least is None else least.memory.reserved
        answers.append(Answer(rule.question, rule.choice, reserved, request.usable_bytes, chosen is not None))
        if chosen is not None:
            return Walk(tuple(answers), rule.choice, chosen, best, _verdict(rule.choice, chosen, best))
    verdict = "the guide has no answer" + (f"; the planner has one: {describe(best)}" if best is not None else "")
    return Walk(tuple(answers), None, None, best, verdict)


def layer_figures(request: Request) -> Iterator[str]:
    """Numbers that the guide speaks of: parameters, states and the largest layer.

    Args:
        request: What is to be trained on what.
    """
    costs = model_costs(request.shape, request.frozen)
    yield f"{costs.total / 1e9:.2f} B parameters, {16 * costs.total / 1e9:.1f} GB of states at 16 bytes each"
    yield f"a layer has {costs.block / 1e6:.0f} M parameters, {2 * costs.block / 1e9:.2f} GB when it is gathered"


def _verdict(choice: str, chosen: Plan, best: Plan | None) -> str:
    if best is None or best.ranked_s >= chosen.ranked_s * (1 - CLOSE):
        return f"the planner agrees with {choice}"
    gain = best.tokens_per_s / chosen.tokens_per_s - 1
    ours, theirs = best.time._asdict(), chosen.time._asdict()
    part = max(PARTS, key=lambda name: theirs[name] - ours[name])
    why = why_behind(best, chosen)
    if chosen.candidate.recompute.name != best.candidate.recompute.name and part in ("matmul_s", "memory_s"):
        why += f", as what it leaves of memory asks for recompute {chosen.candidate.recompute.name}"
    return f"the planner disagrees: {describe(best)} is faster by {gain:.1%}; {choice} takes {why}"
