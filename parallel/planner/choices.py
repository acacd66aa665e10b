"""Lists the ways in which a layout can group, gather and sum what it sends."""

from functools import lru_cache

from parallel.block_rules import sees_whole_blocks
from parallel.config import Units
from parallel.planner.candidate import BUCKET_CAP_MB, PLAIN, Candidate, Options, Reduce, Request
from parallel.planner.costs import ModelCosts
from parallel.traits import TRAITS

BUCKETS_MB = (BUCKET_CAP_MB, 5.0, 100.0, 400.0)
"""Sizes of ddp's buckets that are tried, in MiB: the default first."""
PREFETCHES = (0, 2, 3)
"""Units ahead that are tried; of 1, which backends do by themselves, nothing else is predicted."""
PRICE, PRICE_OF_BFLOAT16 = 0.01, 0.05
"""How much faster a layout must be for each choice that is not the default, and for sums that lose digits."""


def price(options: Options) -> float:
    """The factor by which times are raised before they are ranked, so that a plain layout wins a draw.

    Args:
        options: What is not plain.
    """
    return 1 + PRICE * options.num_changes + PRICE_OF_BFLOAT16 * (options.reduce == "bfloat16")


def choices(request: Request, costs: ModelCosts, candidate: Candidate) -> tuple[Options, ...]:
    """The legal options of a candidate, from the plainest.

    Args:
        request: What is to be trained on what.
        costs: The model.
        candidate: The layout and what varies within it.
    """
    config = candidate.config
    traits = TRAITS[config.data_parallel]
    reduces: tuple[Reduce, ...] = ("float32",) if request.compute == "stored" else request.reduces
    if not traits.shards:
        buckets = BUCKETS_MB if traits.has_buckets and config.tp == config.pp == 1 else BUCKETS_MB[:1]
        return _of_buckets(buckets, reduces)
    ranks = config.dp_shard * config.cp
    if config.pp > 1 or ranks == 1 or config.resolved_strategy == "no_shard":
        # Units are gathered once a step, or never.
        return _of_units((("block", 0),), (None,), (0,), reduces)
    by_graph = sees_whole_blocks(config, candidate.recompute.checkpointing)
    attention = 2 * costs.width * (costs.query_width + costs.kv_width)
    units: tuple[tuple[Units, int], ...] = (("block", 0), ("model", 0), *(() if by_graph else (("size", attention),)))
    groups: tuple[int | None, ...] = (None,)
    if "reshard_group" not in traits.refused_sharding and config.resolved_strategy in ("full_shard", "hybrid_shard"):
        most = max(2, request.gpu.gpus_per_node // config.tp)
        groups += tuple(each for each in range(2, min(most, ranks - 1) + 1) if ranks % each == 0)
    prefetches = PREFETCHES if traits.most_prefetch is None else PREFETCHES[:1]
    return _of_units(units, groups, prefetches, reduces)


def leanest(options: tuple[Options, ...]) -> Options:
    """The options that hold least.

    Args:
        options: What `choices` gave.
    """
    small = [each for each in options if each.units == "size"] or [each for each in options if each.units == "block"]
    plain = [each for each in small if each.prefetch == 0 and each.reshard_group is None]
    return min(plain, key=lambda each: each.reduce)


@lru_cache
def fastest(options: tuple[Options, ...]) -> tuple[Options, ...]:
    """Options of which one takes no longer than any: the best of each choice by itself, and one unit.

    Args:
        options: What `choices` gave.
    """
    reduce = min(each.reduce for each in options)
    best = [each for each in options if each.reduce == reduce]
    ahead = max(each.prefetch for each in best)
    groups = {each.reshard_group for each in best}
    by_unit = [PLAIN._replace(reshard_group=group, prefetch=ahead, reduce=reduce) for group in groups]
    whole = [each for each in best if each.units == "model"]
    return (*by_unit, *whole, *(each for each in best if each.bucket_cap_mb != BUCKET_CAP_MB))


@lru_cache
def _of_buckets(sizes: tuple[float, ...], reduces: tuple[Reduce, ...]) -> tuple[Options, ...]:
    found = (PLAIN._replace(bucket_cap_mb=size, reduce=reduce) for size in sizes for reduce in reduces)
    return tuple(sorted(found, key=price))


@lru_cache
def _of_units(
    units: tuple[tuple[Units, int], ...],
    groups: tuple[int | None, ...],
    prefetches: tuple[int, ...],
    reduces: tuple[Reduce, ...],
) -> tuple[Options, ...]:
    """Options of a backend that shards; one unit leaves nothing to gather ahead or to keep."""
    found = (
        Options(name, least or PLAIN.unit_min_parameters, group, ahead, BUCKET_CAP_MB, reduce)
        for name, least in units
        for group in (groups if name != "model" else groups[:1])
        for ahead in (prefetches if name != "model" else prefetches[:1])
        for reduce in reduces
    )
    return tuple(sorted(found, key=price))
