"""Predicts how long the collectives of the axes within a micro-batch take: tp, cp, ep, and between stages."""

from typing import NamedTuple

from parallel.config import ParallelConfig
from parallel.context_parallel import sent_kv_heads
from parallel.ledger.traffic_of_context_parallel import exchanges_again
from parallel.planner.candidate import Candidate
from parallel.planner.constants import Constants
from parallel.planner.costs import FLOAT32, ModelCosts
from parallel.planner.hardware import Gpu
from parallel.planner.links import Link, link_of_view
from parallel.planner.pipeline import crossings


class Ranks(NamedTuple):
    """What joins the ranks of each view.

    Attributes:
        config: The layout.
        gpu: What has the links.
        tp: Of each matrix.
        cp: Of a sequence.
        pp: Of a pipeline.
        fsdp: Of a copy of the parameters.
        replicas: Of the same part of the parameters.
        ep: Of the experts of a layer.
        experts: Of each expert.
    """

    config: ParallelConfig
    gpu: Gpu
    tp: Link
    cp: Link
    pp: Link
    fsdp: Link
    replicas: Link
    ep: Link
    experts: Link


def join_ranks(config: ParallelConfig, gpu: Gpu, constants: Constants) -> Ranks:
    """The links of a layout.

    Args:
        config: The layout with every degree resolved.
        gpu: Its links.
        constants: What share of them is achieved.
    """
    over_replicas = "loss" if config.resolved_strategy == "no_shard" else "dp_replicate"
    views = ("tp", "cp", "pp", "fsdp", over_replicas)
    links = [link_of_view(config, view, gpu, constants) for view in views]
    # Neighbours along fsdp share the experts.
    links.append(Link(config.ep, config.tp, gpu, constants))
    links.append(Link(config.dp_shard * config.cp // config.ep, config.tp * config.ep, gpu, constants))
    return Ranks(config, gpu, *links)


def exposed(sent_s: float, behind_s: float, constants: Constants) -> float:
    """What collectives add to a step that could hide them.

    Args:
        sent_s: Time of the collectives.
        behind_s: Time of the computation that runs meanwhile.
        constants: How well they overlap.
    """
    hidden = constants.interference * min(sent_s, behind_s)
    return max(0.0, sent_s - constants.overlap * behind_s) + hidden


def tensor_parallel_s(costs: ModelCosts, candidate: Candidate, num_tokens: int, link: Link) -> float:
    """Seconds of one block for one micro-batch; nothing hides them, as each matmul waits for what it is given.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
        num_tokens: Tokens of a micro-batch on this rank.
        link: What joins the ranks of `tp`.
    """
    if link.ranks == 1:
        return 0.0
    recompute = candidate.recompute
    hidden = num_tokens * costs.width * candidate.itemsize
    again = recompute.checkpointing != "none"
    # The last sum of a block is not needed again.
    sums_again = again and not recompute.keeps_sums
    if not candidate.config.sequence_parallel:
        count = 4 + sums_again
        return link.time_s("all_reduce", count * hidden, count)
    count = 8 + 2 * again + sums_again
    return link.time_s("all_gather", count * hidden, count)


def ends_of_tensor_parallel_s(
    costs: ModelCosts, candidate: Candidate, num_tokens: int, link: Link, embeds: bool, has_head: bool
) -> float:
    """Seconds of what is outside of blocks for one micro-batch: the stream that the embedding sums, and the head's.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
        num_tokens: Tokens of a micro-batch on this rank.
        link: What joins the ranks of `tp`.
        embeds: Whether the rank has the embedding.
        has_head: Whether it has the head.
    """
    count, hidden = embeds + has_head, num_tokens * costs.width * candidate.itemsize
    if link.ranks == 1 or count == 0:
        return 0.0
    if candidate.config.sequence_parallel:
        sent_s = link.time_s("all_gather", 2 * count * hidden, 2 * count)
    else:
        sent_s = link.time_s("all_reduce", count * hidden, count)
    # Of each token the largest logit, the sum of exponentials and the target's logit.
    return sent_s + (link.time_s("all_reduce", 3 * FLOAT32 * num_tokens, 3) if has_head else 0.0)


def context_parallel_s(
    costs: ModelCosts, candidate: Candidate, num_tokens: int, link: Link, attention_s: float, constants: Constants
) -> float:
    """Seconds of one block for one micro-batch; a ring runs beside attention, the other methods before it.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
        num_tokens: Tokens of a micro-batch on this rank.
        link: What joins the ranks of `cp`.
        attention_s: Time of attention in the block.
        constants: How well collectives overlap.
    """
    config, itemsize = candidate.config, candidate.itemsize
    if link.ranks == 1:
        return 0.0
    recompute = candidate.recompute
    again = exchanges_again(config.cp_method, recompute.checkpointing, recompute.policy)
    keys = 2 * costs.kv_width / config.tp * num_tokens * itemsize
    if config.cp_method == "ring":
        # Backward sends keys and values with their gradients in float32.
        runs = 1 + again + 1 + FLOAT32 / itemsize
        others = link.ranks - 1
        return exposed(runs * others * (keys / link.direct_bytes_per_s + link.hop_s), attention_s, constants)
    if config.cp_method == "allgather":
        return link.time_s("all_gather", (2 + again) * keys * link.ranks, 2 + again)
    head_dim = costs.query_width / costs.num_heads
    kv_heads = sent_kv_heads(round(costs.kv_width / head_dim) // config.tp, link.ranks)
    sent = 2 * (costs.query_width / config.tp + kv_heads * head_dim) * num_tokens * itemsize
    return link.time_s("all_to_all", (2 + again) * sent, 2 * (2 + again))


def expert_parallel_s(costs: ModelCosts, candidate: Candidate, num_tokens: int, link: Link) -> float:
    """Seconds of one block for one micro-batch: tokens go to their experts and come back, and so do gradients.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
        num_tokens: Tokens of a micro-batch on this rank.
        link: What joins the ranks of `ep`.
    """
    if link.ranks == 1 or costs.experts is None:
        return 0.0
    count = 6 if candidate.recompute.checkpointing != "none" else 4
    sent = num_tokens * costs.experts.chosen * costs.width * candidate.itemsize
    return costs.experts.share * link.time_s("all_to_all", count * sent, count)


def between_stages_s(costs: ModelCosts, candidate: Candidate, num_tokens: int, link: Link) -> float:
    """Seconds of one rank for one micro-batch: the stream on, and its gradient back.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
        num_tokens: Tokens of a micro-batch on this rank.
        link: What joins the ranks of `pp`.
    """
    config = candidate.config
    if config.schedule is None:
        return 0.0
    part = config.tp if config.sequence_parallel else 1
    sent = num_tokens * costs.width * candidate.itemsize / part
    return crossings(config.pp, config.schedule) * (sent / link.bytes_per_s + link.hop_s)
