"""Holds a candidate with what is predicted of it, and says which of two is to be preferred."""

from typing import NamedTuple

from parallel.config import ParallelConfig
from parallel.planner.bounds import Degrees
from parallel.planner.candidate import Candidate, Request
from parallel.planner.choices import PRICE, price
from parallel.planner.constants import Constants
from parallel.planner.costs import ModelCosts
from parallel.planner.memory import Memory, predict_memory
from parallel.planner.timing import Time, predict_time
from parallel.planner.waiting import Ranks, join_ranks
from parallel.traits import TRAITS

UNVALIDATED = {
    "pp": "pipeline stages and their bubble",
    "cp": "what context parallel sends",
    "dp_replicate": "gradients over replicas",
    "ep": "what expert parallel sends",
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
    def ranked_s(self) -> float:
        """Time of a step with what it must be better by: for terms that nothing checks, and for each special choice."""
        return self.time.step_s * doubt(self.candidate.config) * price(self.candidate.options)

    @property
    def fits(self) -> bool:
        """Whether GPU and host have the memory."""
        in_host = self.memory.host <= self.request.gpu.host_memory_bytes
        return self.memory.reserved <= self.request.usable_bytes and in_host

    @property
    def unvalidated(self) -> tuple[str, ...]:
        """Terms of the prediction that no published row checks."""
        config = self.candidate.config
        words = [words for axis, words in UNVALIDATED.items() if getattr(config, axis) > 1]
        if self.request.shape.num_experts:
            words.append("matmuls of experts")
        if self.request.frozen:
            words.append("memory and time of frozen parameters")
        if config.precision.float8:
            words.append("matmuls in float8, whose casts are left out")
        if config.sharding.cpu_offload:
            words.append("states in host memory")
        return tuple(words)


def doubt(degrees: Degrees | ParallelConfig) -> float:
    """The factor by which times of a layout are raised for terms that nothing checks.

    Args:
        degrees: Ranks along each axis, perhaps with all else that a layout says.
    """
    times = 1 + DOUBT * sum(getattr(degrees, axis, 1) > 1 for axis in UNVALIDATED)
    if isinstance(degrees, ParallelConfig):
        special = TRAITS[degrees.data_parallel].flattens + degrees.sharding.cpu_offload
        times *= 1 + PRICE * (special + (not degrees.sequence_parallel))
    return times


def rank(plan: Plan) -> tuple[float, float]:
    """By what plans are sorted: time, then memory.

    Args:
        plan: A plan.
    """
    return plan.ranked_s, plan.memory.reserved


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
