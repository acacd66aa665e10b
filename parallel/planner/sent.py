"""Says how many bytes a rank sends over each axis in a step: what the predicted times of collectives are made of."""

from dataclasses import replace

from parallel.planner.candidate import Candidate
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import ModelCosts
from parallel.planner.gathering import Work, data_parallel_s
from parallel.planner.hardware import Gpu
from parallel.planner.links import GB
from parallel.planner.states import fullest
from parallel.planner.waiting import (
    between_stages_s,
    context_parallel_s,
    ends_of_tensor_parallel_s,
    expert_parallel_s,
    join_ranks,
    tensor_parallel_s,
)

ALL_SENT = CONSTANTS._replace(link_share=1.0, overlap=0.0, interference=0.0)
"""Links are used in full, and nothing runs beside what they carry."""


def with_unit_links(gpu: Gpu) -> Gpu:
    """A GPU whose links take a second for each byte and nothing for a hop, so that times are bytes.

    Args:
        gpu: Any.
    """
    return replace(gpu, node_link_gb_per_s=1 / GB, network_link_gb_per_s=1 / GB, hop_latency_us=1e-12)


def sent_bytes(costs: ModelCosts, candidate: Candidate, sequence_length: int, gpu: Gpu) -> dict[str, float]:
    """Bytes that the rank which holds most puts on the wire, by what they are for: `dp`, `tp`, `cp`, `ep`, `pp`.

    These are the formulas of the time model, asked for bytes. Left out is what hardly takes time: gradients of norms
    that ranks of `tp` sum, what fills up uneven shards, and agreements of a few numbers.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
        sequence_length: Tokens of a sequence.
        gpu: What has the links.
    """
    config, times = candidate.config, candidate.num_micro_batches
    ranks = join_ranks(config, with_unit_links(gpu), ALL_SENT)
    num_tokens = candidate.micro_batch * sequence_length // config.cp
    load = fullest(costs, config)
    blocks = load.num_blocks
    work = Work(load, 0.0, 0.0)
    ends = ends_of_tensor_parallel_s(costs, candidate, num_tokens, ranks.tp, load.has_embedding, load.has_head)
    return {
        "dp": data_parallel_s(costs, candidate, candidate.options, work, ranks, ALL_SENT),
        "tp": times * (blocks * tensor_parallel_s(costs, candidate, num_tokens, ranks.tp) + ends),
        "cp": times * blocks * context_parallel_s(costs, candidate, num_tokens, ranks.cp, 0.0, ALL_SENT),
        "ep": times * blocks * expert_parallel_s(costs, candidate, num_tokens, ranks.ep),
        "pp": times * between_stages_s(costs, candidate, num_tokens, ranks.pp),
    }
