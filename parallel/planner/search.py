"""Finds the layouts that fit and train fastest, without evaluating those that cannot be among them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from parallel.config import ParallelConfig
from parallel.planner.bounds import Degrees, Kind, least_bytes, least_time_s
from parallel.planner.candidate import Candidate, Request
from parallel.planner.constants import CONSTANTS, Constants
from parallel.planner.costs import ModelCosts, model_costs
from parallel.planner.enumeration import candidates, divisors, layouts, legal_degrees, schedules
from parallel.planner.memory import Memory, predict_memory
from parallel.planner.timing import Time, predict_time
from parallel.planner.waiting import Ranks, join_ranks

UNVALIDATED = {
    "pp": "pipeline stages and their bubble",
    "cp": "what context parallel sends",
    "dp_replicate": "gradients over replicas",
}
"""Axes whose terms no published row checks, by the words for those terms."""
DOUBT = 0.05
"""How much faster a layout must be for each such axis to be ranked above one without."""


class Plan(NamedTuple):
    """A candidate with what is predicted of it.

    Attributes:
        request: What it answers.
        candidate: The layout and what varies within it.
        memory: Of the rank that holds most.
        time: Of a step.
    """

    request: Request
    candidate: Candidate
    memory: Memory
    time: Time

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of each GPU."""
        request = self.request
        return request.global_batch * request.sequence_length / (self.time.step_s * request.num_gpus)

    @property
    def doubted_s(self) -> float:
        """Time of a step, with an allowance for terms that nothing checks."""
        return self.time.step_s * doubt(self.candidate.config)

    @property
    def unvalidated(self) -> tuple[str, ...]:
        """Terms of the prediction that no published row checks."""
        return tuple(words for axis, words in UNVALIDATED.items() if getattr(self.candidate.config, axis) > 1)


def doubt(degrees: Degrees | ParallelConfig) -> float:
    """The factor by which times of a layout are raised for terms that nothing checks.

    Args:
        degrees: Ranks along each axis.
    """
    return 1 + DOUBT * sum(getattr(degrees, axis) > 1 for axis in UNVALIDATED)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        plans: The fastest that fit, best first, one for each layout.
        num_degrees: Legal ways to give degrees to the axes.
        num_evaluated: Candidates of which memory was predicted.
        num_too_large: Those among them that do not fit.
    """

    plans: tuple[Plan, ...]
    num_degrees: int
    num_evaluated: int
    num_too_large: int


def search(request: Request, constants: Constants = CONSTANTS, most: int = 10) -> Found:
    """The fastest layouts that fit.

    Degrees come in the order of a lower bound of their step time. Once that bound is above the time of the last of
    `most` layouts, no other can be among them; so the result is that of evaluating all.

    Args:
        request: What is to be trained on what.
        constants: What is taken from measurement.
        most: Layouts to find.

    Raises:
        ValueError: If the model has experts.
    """
    costs = model_costs(request.shape)
    legal = legal_degrees(request)
    ordered = sorted(
        (least_time_s(costs, request, degrees, schedule, constants) * doubt(degrees), degrees, schedule or "")
        for degrees in legal
        for schedule in schedules(degrees)
    )
    best: list[Plan] = []
    evaluated = too_large = 0
    for least_s, degrees, schedule in ordered:
        limit_s = best[-1].doubted_s if len(best) == most else math.inf
        if least_s > limit_s:
            break

        def may_fit(kind: Kind, degrees: Degrees = degrees) -> bool:
            return least_bytes(costs, request, degrees, kind) <= request.usable_bytes

        for config in layouts(request, degrees, schedule or None, may_fit):
            limit_s = best[-1].doubted_s if len(best) == most else math.inf
            plan, tried, failed = _best_of_layout(request, costs, config, constants, limit_s)
            evaluated, too_large = evaluated + tried, too_large + failed
            if plan is not None:
                best = sorted([*best, plan], key=_rank)[:most]
    return Found(plans=tuple(best), num_degrees=len(legal), num_evaluated=evaluated, num_too_large=too_large)


def smallest(request: Request, constants: Constants = CONSTANTS) -> Plan | None:
    """The layout that holds least, whether it fits or not; None where no degrees are legal.

    Args:
        request: What is to be trained on what.
        constants: What is taken from measurement.
    """
    costs = model_costs(request.shape)
    kind = Kind("fsdp2", "full_shard")
    ordered = sorted((least_bytes(costs, request, each, kind), each) for each in legal_degrees(request))
    best: Plan | None = None
    for fewest_bytes, degrees in ordered:
        limit_bytes = math.inf if best is None else best.memory.allocated
        if fewest_bytes > limit_bytes:
            break

        def may_be_smaller(kind: Kind, degrees: Degrees = degrees, limit_bytes: float = limit_bytes) -> bool:
            return least_bytes(costs, request, degrees, kind) < limit_bytes

        configs = [each for name in schedules(degrees) for each in layouts(request, degrees, name, may_be_smaller)]
        for config in configs:
            for row in candidates(request, config, 1):
                memory = predict_memory(costs, row[-1], request.sequence_length, constants)
                if best is None or memory.reserved < best.memory.reserved:
                    best = evaluate(request, costs, row[-1], constants, memory)
    return best


def evaluate(
    request: Request,
    costs: ModelCosts,
    candidate: Candidate,
    constants: Constants,
    memory: Memory | None = None,
    ranks: Ranks | None = None,
) -> Plan:
    """Predicts one candidate.

    Args:
        request: What is to be trained on what.
        costs: The model.
        candidate: The layout and what varies within it.
        constants: What is taken from measurement.
        memory: What was predicted of its memory, where that is known.
        ranks: The links of its layout, where they are known.
    """
    length, gpu = request.sequence_length, request.gpu
    ranks = ranks or join_ranks(candidate.config, gpu, constants)
    time = predict_time(costs, candidate, length, gpu, constants, ranks)
    return Plan(request, candidate, memory or predict_memory(costs, candidate, length, constants), time)


def _best_of_layout(
    request: Request, costs: ModelCosts, config: ParallelConfig, constants: Constants, limit_s: float
) -> tuple[Plan | None, int, int]:
    """The fastest candidate of a layout that fits and beats a limit; how many were tried, and how many do not fit."""
    best: Plan | None = None
    tried = failed = 0
    ranks, doubts = join_ranks(config, request.gpu, constants), doubt(config)
    for micro_batch in divisors(request.global_batch // (config.dp_replicate * config.dp_shard)):
        fits = True
        for row in candidates(request, config, micro_batch):
            for candidate in row:
                time = predict_time(costs, candidate, request.sequence_length, request.gpu, constants, ranks)
                tried += 1
                if time.step_s * doubts > limit_s:
                    break
                memory = predict_memory(costs, candidate, request.sequence_length, constants)
                fits = memory.reserved <= request.usable_bytes
                if fits:
                    plan = Plan(request, candidate, memory, time)
                    best = plan if best is None else min(best, plan, key=_rank)
                    limit_s = best.doubted_s
                    break
                failed += 1
        if not fits:
            # Larger micro-batches hold more.
            break
    return best, tried, failed


def _rank(plan: Plan) -> tuple[float, float]:
    return plan.doubted_s, plan.memory.reserved
