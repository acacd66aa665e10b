"""Says what ranks of a pipeline run, send and hold in it, and how long they idle."""

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from parallel.config import ParallelConfig, Schedule
from parallel.planner.costs import ModelCosts
from parallel.schedules import SCHEDULES, num_stages, placement, traits_of


class StageLoad(NamedTuple):
    """What one rank runs of a model.

    Attributes:
        num_blocks: Its blocks.
        has_embedding: Whether it has the embedding.
        has_head: Whether it has the head.
        in_flight: Micro-batches whose activations it keeps at a time.
    """

    num_blocks: int
    has_embedding: bool
    has_head: bool
    in_flight: float


def stage_loads(costs: ModelCosts, config: ParallelConfig, num_micro_batches: int) -> tuple[StageLoad, ...]:
    """The ranks of `pp` that may hold most: the first, the last, and one between them if it has more blocks.

    Args:
        costs: The model.
        config: The layout with every degree resolved.
        num_micro_batches: Micro-batches of a step on each rank.
    """
    if config.pp == 1:
        return (StageLoad(costs.num_layers, True, True, 1.0),)
    first, middle, last = blocks_of_ranks(costs, config)
    if traits_of(config).is_v:
        # The first rank has the last stage as well, and all ranks keep about as much.
        kept = float(min(num_micro_batches, config.pp + (config.schedule == "dual_pipe_v")))
        return (StageLoad(first, True, True, kept), StageLoad(middle, False, False, kept))
    loads = [StageLoad(first, True, False, _in_flight(config, 0, num_micro_batches))]
    if config.pp > 2 and middle > first:
        loads.append(StageLoad(middle, False, False, _in_flight(config, 1, num_micro_batches)))
    return (*loads, StageLoad(last, False, True, _in_flight(config, config.pp - 1, num_micro_batches)))


def _in_flight(config: ParallelConfig, rank: int, num_micro_batches: int) -> float:
    """Micro-batches whose activations a rank keeps at a time, those of a part of its stages as a part of one."""
    laps = num_stages(config) // config.pp
    if config.schedule == "gpipe":
        return float(num_micro_batches)
    if laps == 1:
        return float(min(num_micro_batches, config.pp - rank))
    # Warm-up: twice as many part-stages as ranks follow, beside those of later laps, and one that runs. The last rank
    # keeps no more than the first, but is not known to keep less.
    following = config.pp - 1 - (rank if rank < config.pp - 1 else 0)
    return min(float(num_micro_batches), (2 * following + (laps - 1) * config.pp + 1) / laps)


def blocks_of_ranks(costs: ModelCosts, config: ParallelConfig) -> tuple[int, int, int]:
    """Blocks of the first rank of `pp`, most of another one, and of the last one, all of whose blocks are alike.

    Args:
        costs: The model.
        config: The layout with every degree resolved.
    """
    if config.schedule is None:
        return costs.num_layers, 0, costs.num_layers
    before, after = costs.width / costs.matmuls, (2 + costs.vocab_size) * costs.width / costs.matmuls
    return _blocks_of_ranks(costs.num_layers, config.pp, config.schedule, before, after)


@lru_cache(maxsize=4096)
def _blocks_of_ranks(num_layers: int, pp: int, schedule: Schedule, before: float, after: float) -> tuple[int, int, int]:
    ranks = _ranks(pp, schedule)
    blocks = [0] * pp
    for rank, size in zip(ranks, _balanced(num_layers, len(ranks), before, after), strict=True):
        blocks[rank] += size
    return blocks[0], max(blocks[1:], default=0), blocks[-1]


def _ranks(pp: int, schedule: Schedule) -> tuple[int, ...]:
    """The rank of each stage, of which plans have as few as the schedule takes."""
    return placement(pp * SCHEDULES[schedule].fewest, pp, is_v=SCHEDULES[schedule].is_v)


def _balanced(num_layers: int, count: int, before: float, after: float) -> list[int]:
    """What `parallel.stages.balance` finds where all blocks are alike, for which that one would take seconds.

    Args:
        num_layers: Blocks.
        count: Stages.
        before: What the first stage has beside its blocks, in blocks.
        after: The same of the last.
    """
    if count == 1 or count > num_layers:
        # Searches look at layouts with too many stages before they drop them.
        return [-(-num_layers // count)] * count
    between, found = count - 2, list[tuple[float, float, int, int]]()
    for last in range(1, min(num_layers - count, num_layers // count + 1) + 2):
        even = (num_layers - last) // (count - 1)
        for first in range(max(1, even - 1), even + 3) if between else (num_layers - last,):
            rest = num_layers - first - last
            if rest >= between:
                low, more = divmod(rest, between) if between else (0, 0)
                ends, middle = (first + before, last + after), low + (more > 0)
                squares = ends[0] ** 2 + ends[1] ** 2 + (between - more) * low**2 + more * (low + 1) ** 2
                found.append((max(*ends, middle), squares, first, -last))
    _, _, first, negative = min(found)
    low, more = divmod(num_layers - first + negative, between) if between else (0, 0)
    return [first, *([low] * (between - more)), *([low + 1] * more), -negative]


@lru_cache(maxsize=1024)
def crossings(pp: int, schedule: Schedule) -> int:
    """Times that the rank which sends most passes a micro-batch's stream on, or the gradient of it back.

    Args:
        pp: Ranks of the pipeline.
        schedule: Its schedule.
    """
    borders = [pair for pair in pairwise(_ranks(pp, schedule)) if pair[0] != pair[1]]
    return max(Counter(rank for pair in borders for rank in pair).values(), default=0)


def bubble(schedule: Schedule, pp: int, num_micro_batches: int) -> float:
    """Time that ranks of a pipeline idle, over the time that they compute.

    Args:
        schedule: Its schedule.
        pp: Its ranks.
        num_micro_batches: Micro-batches of a step on each rank.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    section 2.2; where gradients of weights fill the bubble a third is left: Qi et al. 2023, "Zero bubble pipeline
    parallelism"; assumed here, not checked.
    """
    traits = SCHEDULES[schedule]
    return (pp - 1) / (traits.fewest * num_micro_batches) / (3 if traits.splits_backward else 1)
