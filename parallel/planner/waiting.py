"""Predicts how long the collectives of each axis take, and what of that computation hides."""

from typing import NamedTuple

from parallel.config import ParallelConfig
from parallel.ledger.parts import num_shards
from parallel.planner.candidate import Candidate
from parallel.planner.constants import Constants
from parallel.planner.costs import FLOAT32, ModelCosts
from parallel.planner.hardware import Gpu
from parallel.planner.links import Link
from parallel.schedules import traits_of
from parallel.traits import TRAITS


class Ranks(NamedTuple):
    """What joins the ranks of each view.

    Attributes:
        config: The layout.
        tp: Of each matrix.
        cp: Of a sequence.
        pp: Of a pipeline.
        fsdp: Of a copy of the parameters.
        replicas: Of the same part of the parameters.
    """

    config: ParallelConfig
    tp: Link
    cp: Link
    pp: Link
    fsdp: Link
    replicas: Link


def join_ranks(config: ParallelConfig, gpu: Gpu, constants: Constants) -> Ranks:
    """The links of a layout.

    Args:
        config: The layout with every degree resolved.
        gpu: Its links.
        constants: What share of them is achieved.
    """
    over_replicas = "loss" if config.resolved_strategy == "no_shard" else "dp_replicate"
    views = ("tp", "cp", "pp", "fsdp", over_replicas)
    return Ranks(config, *(Link(config, view, gpu, constants) for view in views))


def exposed(sent_s: float, behind_s: float, constants: Constants) -> float:
    """What collectives add to a step that could hide them.

    Args:
        sent_s: Time of the collectives.
        behind_s: Time of the computation that runs meanwhile.
        constants: How well they overlap.
    """
    hidden = constants.interference * min(sent_s, behind_s)
    return max(0.0, sent_s - constants.overlap * behind_s) + hidden


def tensor_parallel_s(costs: ModelCosts, candidate: Candidate, num_tokens: int, itemsize: int, link: Link) -> float:
    """Seconds of one block for one micro-batch; nothing hides them, as each matmul waits for what it is given."""
    if link.ranks == 1:
        return 0.0
    recompute = candidate.recompute
    hidden = num_tokens * costs.width * itemsize
    again = recompute.checkpointing != "none"
    # The last sum of a block is not needed again.
    sums_again = again and not recompute.keeps_sums
    if not candidate.config.sequence_parallel:
        count = 4 + sums_again
        return link.time_s("all_reduce", count * hidden, count)
    count = 8 + 2 * again + sums_again
    return link.time_s("all_gather", count * hidden, count)


def context_parallel_s(
    costs: ModelCosts,
    candidate: Candidate,
    num_tokens: int,
    itemsize: int,
    link: Link,
    blocks: int,
    attention_s: float,
    constants: Constants,
) -> float:
    """Seconds of all blocks for one micro-batch; a ring runs beside attention, the other methods before it."""
    config, again = candidate.config, not candidate.recompute.keeps_attention
    if link.ranks == 1:
        return 0.0
    keys = 2 * costs.kv_width / config.tp * num_tokens * itemsize
    if config.cp_method == "ring":
        # Backward sends keys and values with their gradients in float32.
        runs = 1 + again + 1 + FLOAT32 / itemsize
        others = link.ranks - 1
        sent_s = blocks * runs * others * (keys / link.bytes_per_s + link.hop_s)
        return exposed(sent_s, attention_s, constants)
    if config.cp_method == "allgather":
        return blocks * link.time_s("all_gather", (2 + again) * keys * link.ranks, 2 + again)
    queries = 2 * costs.query_width / config.tp * num_tokens * itemsize
    return blocks * link.time_s("all_to_all", (2 + again) * (keys + queries), 2 * (2 + again))


def between_stages_s(costs: ModelCosts, config: ParallelConfig, num_tokens: int, itemsize: int, link: Link) -> float:
    """Seconds of one rank for one micro-batch: the stream on, and its gradient back, once a lap."""
    if link.ranks == 1:
        return 0.0
    laps = traits_of(config).fewest
    return 2 * laps * (num_tokens * costs.width * itemsize / link.bytes_per_s + link.hop_s)


def data_parallel_s(costs: ModelCosts, candidate: Candidate, blocks: int, itemsize: int, ranks: Ranks) -> float:
    """Seconds that parameters and gradients travel in a step, whatever hides them."""
    config, times, traits = candidate.config, candidate.num_micro_batches, TRAITS[candidate.config.data_parallel]
    root = costs.embedding + costs.head if config.pp == 1 else costs.embedding
    block, units = blocks * costs.block / config.tp, blocks + 2
    own = block + root / config.tp
    reduced = FLOAT32 if config.precision.reduce != "bfloat16" else 2
    whole = config.resolved_strategy == "no_shard"
    once = candidate.reduce_gradients == "last" or config.pp > 1 or not traits.sums_each_micro_batch
    reductions = 1 if once else times
    if whole:
        sent_s = reductions * ranks.replicas.time_s("all_reduce", reduced * own, units)
        if traits.splits_optimizer_rows:
            sent_s += ranks.replicas.time_s("all_gather", FLOAT32 * own, units)
        return sent_s
    gathers = 1 if config.pp > 1 else times
    sent_s = gathers * ranks.fsdp.time_s("all_gather", itemsize * own, units)
    if config.pp == 1 and config.resolved_strategy in ("full_shard", "hybrid_shard"):
        # Embedding and head are not gathered for backward.
        sent_s += gathers * ranks.fsdp.time_s("all_gather", itemsize * block, blocks)
    sent_s += reductions * ranks.fsdp.time_s("reduce_scatter", reduced * own, units)
    return sent_s + reductions * ranks.replicas.time_s("all_reduce", reduced * own / num_shards(config), units)
