"""Says what the fullest stages of a pipeline hold, beside how long its ranks idle."""

from typing import NamedTuple

from parallel.config import ParallelConfig, Schedule
from parallel.planner.costs import ModelCosts
from parallel.schedules import SCHEDULES, num_stages, traits_of


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
    """The ranks of `pp` that may hold most: the first and the last.

    Args:
        costs: The model.
        config: The layout with every degree resolved.
        num_micro_batches: Micro-batches of a step on each rank.
    """
    if config.pp == 1:
        return (StageLoad(costs.num_layers, True, True, 1.0),)
    first, last = most_blocks(costs, config)
    laps = num_stages(config) // config.pp
    if config.schedule == "gpipe":
        early = late = float(num_micro_batches)
    elif traits_of(config).is_v:
        # The first rank has the last stage as well, and all ranks keep about as much.
        early = late = min(num_micro_batches, config.pp + (config.schedule == "dual_pipe_v"))
        return (StageLoad(first, True, True, early), StageLoad(first, False, False, late))
    else:
        # Warm-up: 2 (pp - 1) of the first rank's part-stages beside its later laps, and one that runs.
        early = config.pp if laps == 1 else (2 * (config.pp - 1) + (laps - 1) * config.pp + 1) / laps
        early, late = min(float(num_micro_batches), early), min(float(num_micro_batches), 1.0 if laps == 1 else early)
    return (StageLoad(first, True, False, early), StageLoad(last, False, True, late))


def most_blocks(costs: ModelCosts, config: ParallelConfig) -> tuple[int, int]:
    """Blocks of a rank of `pp` in the middle, and of the rank with the head, where stages are balanced by cost.

    Args:
        costs: The model.
        config: The layout with every degree resolved.
    """
    count = num_stages(config)
    laps = count // config.pp
    matmuls = costs.block - 2 * costs.width
    head_blocks = costs.embedding / matmuls
    # The dearest stage: the head counts as some blocks, and a stage has whole ones.
    fewest = max(1, round((costs.num_layers + head_blocks) / count - head_blocks)) if count > 1 else costs.num_layers
    middle = -(-(costs.num_layers - fewest) // max(1, count - 1))
    return laps * middle, (laps - 1) * middle + fewest


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
