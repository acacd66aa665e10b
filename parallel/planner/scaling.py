"""Predicts speed and memory over data-parallel ranks, and where the latency of rings bends the curve."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from parallel.planner.bounds import Degrees, Kind
from parallel.planner.candidate import Request
from parallel.planner.ranking import Plan
from parallel.planner.search import Allows, search
from parallel.traits import TRAITS

BEND = 0.05
"""Share of its speed that latency costs at the bend."""
NO_LATENCY_US = 1e-6
STEP = 0.96
"""Memory of a plan of the frontier, over that of the one before it, at most."""


class Point(NamedTuple):
    """Data-parallel training on some GPUs.

    Attributes:
        ranks: Data-parallel ranks.
        plan: The best plan of that way on them.
        latency_share: Of its speed, what latency costs.
    """

    ranks: int
    plan: Plan
    latency_share: float


class Curve(NamedTuple):
    """One way of data parallelism over ranks.

    Attributes:
        name: Of the way.
        points: In the order of ranks; those on which nothing fits are left out.
    """

    name: str
    points: tuple[Point, ...]

    @property
    def bend(self) -> int | None:
        """Fewest ranks at which latency costs `BEND` of the speed; None: nowhere on the curve."""
        return next((each.ranks for each in self.points if each.latency_share >= BEND), None)


def scale(base: Plan, most_ranks: int = 4096) -> tuple[Curve, ...]:
    """Curves of the ways of data parallelism, with as many sequences on each rank and the other axes as they are.

    Args:
        base: A plan, of which the other axes are taken.
        most_ranks: Where curves end.
    """
    config = base.candidate.config
    fixed = (config.pp, config.cp, config.tp)
    node = max(1, base.request.gpu.gpus_per_node // config.tp)

    def same(degrees: Degrees, kind: Kind) -> bool:
        return (degrees.pp, degrees.cp, degrees.tp) == fixed and not kind.offloads

    def replicated(degrees: Degrees, kind: Kind) -> bool:
        return same(degrees, kind) and not TRAITS[kind.data_parallel].shards

    def sharded(degrees: Degrees, kind: Kind) -> bool:
        return same(degrees, kind) and kind.strategy == "full_shard"

    def hybrid(degrees: Degrees, kind: Kind) -> bool:
        return same(degrees, kind) and kind.strategy == "hybrid_shard" and degrees.dp_shard == node

    ways = {"ddp": replicated, "full_shard": sharded, f"hybrid_shard in groups of {node}": hybrid}
    counts = [2**power for power in range(most_ranks.bit_length()) if 2**power <= most_ranks]
    curves = (Curve(name, tuple(_points(base, counts, allows))) for name, allows in ways.items())
    return tuple(curve for curve in curves if curve.points)


def _points(base: Plan, counts: Sequence[int], allows: Allows) -> list[Point]:
    request, config = base.request, base.candidate.config
    others = config.pp * config.cp * config.tp
    sequences = max(1, request.global_batch // (config.dp_replicate * config.dp_shard))
    points: list[Point] = []
    for ranks in counts:
        asked = replace(request, num_gpus=ranks * others, global_batch=ranks * sequences)
        for plan in search(asked, most=1, allows=allows).plans:
            gpu = replace(request.gpu, hop_latency_us=NO_LATENCY_US)
            # Without latency another plan may be the best.
            ideal = search(replace(asked, gpu=gpu), most=1, allows=allows).plans[0]
            points.append(Point(ranks, plan, max(0.0, 1 - plan.tokens_per_s / ideal.tokens_per_s)))
    return points


def frontier(request: Request, most: int = 16) -> tuple[Plan, ...]:
    """Plans of which none is faster with as little memory: the fastest first, the smallest last.

    Args:
        request: What is to be trained on what.
        most: Plans at most.
    """
    found: list[Plan] = []
    asked = request
    while len(found) < most:
        plans = search(asked, most=1).plans
        if not plans:
            break
        plan = plans[0]
        found.append(plan._replace(request=request))
        headroom = 1 - STEP * plan.memory.reserved / request.gpu.memory_bytes
        asked = replace(request, headroom=headroom)
    # What ranks first may be no faster than what is smaller: a plain plan wins a draw.
    return tuple(
        plan
        for place, plan in enumerate(found)
        if all(plan.tokens_per_s > smaller.tokens_per_s for smaller in found[place + 1 :])
    )
