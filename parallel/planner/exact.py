"""Asks the ledger, which knows every parameter, for what the planner predicts of a plan from counts alone."""

from typing import NamedTuple

from torch import nn

from parallel.ledger.parts import ModelParts, model_parts
from parallel.ledger.states import predict_states as states_of_ledger
from parallel.ledger.term import Term
from parallel.ledger.traffic_of_context_parallel import context_parallel_terms
from parallel.ledger.traffic_of_expert_parallel import expert_parallel_terms
from parallel.ledger.traffic_of_parameters import parameter_terms
from parallel.ledger.traffic_of_pipeline import pipeline_terms
from parallel.ledger.traffic_of_tensor_parallel import tensor_parallel_terms
from parallel.ledger.wire import ring_bytes
from parallel.plan import ParallelPlan
from parallel.planner.candidate import Candidate, Request
from parallel.planner.costs import model_costs
from parallel.planner.pipeline import stage_loads
from parallel.planner.sent import sent_bytes
from parallel.planner.states import States, predict_states

FIRST_RANK = {"fsdp": 0, "loss": 0, "tp": 0}
"""The rank of each group that holds most, as uneven shards leave less to the last ones."""


class Figures(NamedTuple):
    """What one rank holds and sends, in bytes.

    Attributes:
        states: Of the rank of `pp` that holds most.
        sent: By what it is for: `dp`, `tp`, `cp`, `ep`, `pp`.
    """

    states: States
    sent: dict[str, float]


def planned(request: Request, candidate: Candidate) -> Figures:
    """What the planner says.

    Args:
        request: What is to be trained on what.
        candidate: The layout and what varies within it.
    """
    costs, config = model_costs(request.shape, request.frozen), candidate.config
    loads = stage_loads(costs, config, candidate.num_micro_batches)
    states = max(predict_states(costs, config, load) for load in loads)
    return Figures(states, sent_bytes(costs, candidate, request.sequence_length, request.gpu))


def of_ledger(model: nn.Module, plan: ParallelPlan, candidate: Candidate, sequence_length: int) -> Figures:
    """What the ledger says of the same.

    Args:
        model: The whole model, which may be on meta.
        plan: What it declares.
        candidate: The layout and what varies within it.
        sequence_length: Tokens of a sequence.
    """
    config = candidate.layout()
    of_ranks = [model_parts(model, config, plan, rank) for rank in range(config.pp)]
    states = [_states(parts) for parts in of_ranks]
    most = max(range(config.pp), key=lambda rank: states[rank])
    # Ranks in the middle of a pipeline send both ways.
    sent = _sent(of_ranks[most], of_ranks[config.pp // 2], candidate, sequence_length)
    return Figures(states[most], sent)


def _states(parts: ModelParts) -> States:
    moments = states_of_ledger(parts, FIRST_RANK)
    held = moments.after_backward
    return States(held.parameters, held.gradients, held.optimizer_state)


def _sent(parts: ModelParts, in_middle: ModelParts, candidate: Candidate, sequence_length: int) -> dict[str, float]:
    times = candidate.num_micro_batches
    num_tokens = times * candidate.micro_batch * sequence_length // parts.config.cp
    terms = {
        "dp": parameter_terms(parts, times, 0),
        "tp": tensor_parallel_terms(parts, times, num_tokens),
        "cp": context_parallel_terms(parts, num_tokens),
        "ep": expert_parallel_terms(parts, times, num_tokens),
        "pp": pipeline_terms(in_middle, times, num_tokens, 0, 0),
    }
    return {name: sum(_wire_bytes(parts, term) for term in own) for name, own in terms.items()}


def _wire_bytes(parts: ModelParts, term: Term) -> float:
    channel = term.channel
    if channel.ranks == 1:
        return 0.0
    if parts.config.cp_method == "ring" and channel.kind == "all_to_all" and "keys and values" in term.name:
        # A rank of the ring sends all of it to the next one, and keeps no part.
        return term.payload_bytes
    return ring_bytes(channel.kind, term.payload_bytes, channel.ranks)
