"""Finds the layouts that fit and train fastest, without evaluating those that cannot be among them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallel.config import DEGREES, ParallelConfig
from parallel.planner.bounds import Degrees, Kind, least_bytes, least_time_s
from parallel.planner.candidate import Candidate, Options, Request
from parallel.planner.choices import choices, fastest, leanest, price
from parallel.planner.constants import CONSTANTS, Constants
from parallel.planner.costs import KEEP_ALL, ModelCosts, model_costs
from parallel.planner.enumeration import (
    candidates,
    divisors,
    is_accepted,
    layouts,
    legal_degrees,
    possible_layouts,
    schedules,
)
from parallel.planner.memory import predict_memory
from parallel.planner.pipeline import bubble
from parallel.planner.ranking import Plan, doubt, evaluate, rank
from parallel.planner.timing import Computed, compute_time, with_options
from parallel.planner.waiting import Ranks, join_ranks

Allows = Callable[[Degrees, Kind], bool]
"""Says of degrees and a backend with its strategy whether they may be chosen."""


def anything(_degrees: Degrees, _kind: Kind) -> bool:
    """Allows every layout.

    Args:
        _degrees: Ranks along each axis.
        _kind: Backend and strategy.
    """
    return True


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        plans: The fastest that fit, best first, one for each way to split and shard.
        num_degrees: Legal ways to give degrees to the axes.
        num_evaluated: Candidates that were looked at.
        num_too_large: Those among them that do not fit.
    """

    plans: tuple[Plan, ...]
    num_degrees: int
    num_evaluated: int
    num_too_large: int


def search(
    request: Request,
    constants: Constants = CONSTANTS,
    most: int = 10,
    allows: Allows = anything,
    limit_s: float = math.inf,
) -> Found:
    """The fastest layouts that fit.

    Degrees come in the order of a lower bound of their step time. Once that bound is above the time of the last of
    `most` layouts, no other can be among them; so the result is that of evaluating all.

    Args:
        request: What is to be trained on what.
        constants: What is taken from measurement.
        most: Layouts to find.
        allows: Restricts the layouts.
        limit_s: Ranked time beyond which no layout is wanted.
    """
    costs = model_costs(request.shape, request.frozen)
    legal = legal_degrees(request)
    ordered = sorted(
        (least_time_s(costs, request, degrees, schedule, constants) * doubt(degrees), degrees, schedule or "")
        for degrees in legal
        for schedule in schedules(degrees)
    )
    best: list[Plan] = []
    evaluated = too_large = 0
    for least_s, degrees, schedule in ordered:
        limit_s = best[-1].ranked_s if len(best) == most else limit_s
        if least_s > limit_s:
            break

        def may_fit(kind: Kind, degrees: Degrees = degrees) -> bool:
            return allows(degrees, kind) and least_bytes(costs, request, degrees, kind) <= request.usable_bytes

        bounds: dict[tuple[object, ...], float] = {}
        sequences = request.global_batch // (degrees.dp_replicate * degrees.dp_shard)
        for config in possible_layouts(request, degrees, schedule or None, may_fit):
            limit_s = best[-1].ranked_s if len(best) == most else limit_s
            way = (config.cp_method, config.sequence_parallel, config.ep)
            if way not in bounds:
                bounds[way] = _least_work_s(request, costs, config, constants)
            if bounds[way] * _idle(config, sequences) * doubt(config) > limit_s:
                continue
            layout = _Layout(request, costs, config, constants)
            plan = layout.best(limit_s, bounds[way])
            evaluated, too_large = evaluated + layout.tried, too_large + layout.failed
            if plan is not None:
                best = _with_plan(best, plan)[:most]
    return Found(plans=tuple(best), num_degrees=len(legal), num_evaluated=evaluated, num_too_large=too_large)


def _with_plan(best: list[Plan], plan: Plan) -> list[Plan]:
    """The plans with another one, the better of two that split and shard alike."""

    def way(each: Plan) -> tuple[object, ...]:
        config = each.candidate.config
        return (*(getattr(config, axis) for axis in DEGREES), config.resolved_strategy)

    alike = [each for each in best if way(each) == way(plan)]
    others = [each for each in best if way(each) != way(plan)]
    return sorted([*others, min([*alike, plan], key=rank)], key=rank)


def smallest(request: Request, constants: Constants = CONSTANTS, allows: Allows = anything) -> Plan | None:
    """The layout that holds least, whether it fits or not; None where no degrees are legal.

    Args:
        request: What is to be trained on what.
        constants: What is taken from measurement.
        allows: Restricts the layouts.
    """
    costs = model_costs(request.shape, request.frozen)
    kind = Kind("fsdp2", "full_shard", True)
    ordered = sorted((least_bytes(costs, request, each, kind), each) for each in legal_degrees(request))
    best: Plan | None = None
    for fewest_bytes, degrees in ordered:
        limit_bytes = math.inf if best is None else best.memory.allocated
        if fewest_bytes > limit_bytes:
            break

        def may_be_smaller(kind: Kind, degrees: Degrees = degrees, limit_bytes: float = limit_bytes) -> bool:
            return allows(degrees, kind) and least_bytes(costs, request, degrees, kind) < limit_bytes

        configs = [each for name in schedules(degrees) for each in layouts(request, degrees, name, may_be_smaller)]
        for config in configs:
            for row in candidates(request, config, 1):
                least = row[-1]._replace(options=leanest(choices(request, costs, row[-1])))
                memory = predict_memory(costs, least, request.sequence_length, constants)
                if best is None or memory.reserved < best.memory.reserved:
                    best = evaluate(request, costs, least, constants, memory)
    return best


def _least_work_s(request: Request, costs: ModelCosts, config: ParallelConfig, constants: Constants) -> float:
    """What a step takes at least beside idling: the largest micro-batch computes best."""
    sequences = request.global_batch // (config.dp_replicate * config.dp_shard)
    whole = Candidate(config, KEEP_ALL, "last", sequences, 1)
    ranks = join_ranks(config, request.gpu, constants)
    computed = compute_time(costs, whole, request.sequence_length, request.gpu, constants, ranks)
    # What the optimizer takes depends on the backend, and is nothing here where states are in host memory.
    return computed.step_s - computed.time.bubble_s - computed.optimizer_s


def _idle(config: ParallelConfig, num_micro_batches: int) -> float:
    """The factor by which idling in a pipeline makes a step longer."""
    return 1.0 if config.schedule is None else 1 + bubble(config.schedule, config.pp, num_micro_batches)


class _Layout:
    """One layout, of which the fastest candidate that fits is looked for.

    Attributes:
        tried: Candidates that were looked at.
        failed: Those among them that do not fit.
    """

    def __init__(self, request: Request, costs: ModelCosts, config: ParallelConfig, constants: Constants) -> None:
        self._request, self._costs, self._config, self._constants = request, costs, config, constants
        self._ranks: Ranks = join_ranks(config, request.gpu, constants)
        self._doubt = doubt(config)
        self._best: Plan | None = None
        self.tried = self.failed = 0

    def best(self, limit_s: float, least_work_s: float) -> Plan | None:
        """The fastest candidate that fits and whose ranked time is below a limit.

        Args:
            limit_s: The limit.
            least_work_s: What a step takes at least beside idling.
        """
        config, request = self._config, self._request
        sequences = request.global_batch // (config.dp_replicate * config.dp_shard)
        for micro_batch in divisors(sequences):
            if least_work_s * _idle(config, sequences // micro_batch) * self._doubt > limit_s:
                # Fewer micro-batches idle longer.
                break
            outcomes = [self._look_at_row(row, limit_s) for row in candidates(request, config, micro_batch)]
            if outcomes and not any(outcomes):
                # Larger micro-batches hold more.
                break
        return self._best if self._best is not None and is_accepted(request, config) else None

    def _look_at_row(self, row: Sequence[Candidate], limit_s: float) -> bool:
        """Tries candidates from the fastest to the one that holds least; whether any may fit, as far as was looked."""
        for number, candidate in enumerate(row):
            limit_s = limit_s if self._best is None else min(limit_s, self._best.ranked_s)
            request, costs = self._request, self._costs
            computed = compute_time(
                costs, candidate, request.sequence_length, request.gpu, self._constants, self._ranks
            )
            if computed.step_s * self._doubt > limit_s:
                return True
            if number == 0 and not self._may_fit(row[-1]):
                self.tried, self.failed = self.tried + len(row), self.failed + len(row)
                return False
            if not self._look(candidate, computed, limit_s):
                return True
        return True

    def _look(self, candidate: Candidate, computed: Computed, limit_s: float) -> bool:
        """Tries all options of a candidate; whether any can be fast enough."""
        request, costs, constants = self._request, self._costs, self._constants
        options = choices(request, costs, candidate)
        ideal = computed.step_s + min(sum(self._added(computed, candidate, each)) for each in fastest(options))
        if ideal * self._doubt > limit_s:
            return False
        self.tried += 1
        if not self._may_fit(candidate):
            self.failed += 1
            return True
        for each in options:
            if ideal * self._doubt * price(each) > limit_s:
                break
            dp_s, host_s = self._added(computed, candidate, each)
            if (computed.step_s + dp_s + host_s) * self._doubt * price(each) <= limit_s:
                time = computed.time._replace(dp_s=dp_s, host_s=host_s)
                chosen = candidate._replace(options=each)
                memory = predict_memory(costs, chosen, request.sequence_length, constants)
                plan = Plan(request, chosen, memory, time)
                if plan.fits and (self._best is None or rank(plan) < rank(self._best)):
                    self._best, limit_s = plan, min(limit_s, plan.ranked_s)
        return True

    def _added(self, computed: Computed, candidate: Candidate, options: Options) -> tuple[float, float]:
        return with_options(self._costs, candidate, options, computed, self._constants, self._ranks)

    def _may_fit(self, candidate: Candidate) -> bool:
        """Whether a candidate fits with the options that hold least."""
        least = candidate._replace(options=leanest(choices(self._request, self._costs, candidate)))
        memory = predict_memory(self._costs, least, self._request.sequence_length, self._constants)
        host = self._request.gpu.host_memory_bytes
        return memory.reserved <= self._request.usable_bytes and memory.host <= host
