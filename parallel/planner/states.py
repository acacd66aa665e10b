"""Predicts what a rank holds of a training state in closed form, from counts alone."""

from typing import NamedTuple

from parallel.config import ParallelConfig
from parallel.ledger.optimizer_memory import NUMBER_BYTES, OPTIMIZERS
from parallel.ledger.parts import num_shards
from parallel.planner.costs import FLOAT32, ModelCosts
from parallel.planner.pipeline import StageLoad, stage_loads
from parallel.traits import TRAITS

ADAMW = OPTIMIZERS["adamw"]


class States(NamedTuple):
    """Bytes of one rank, wherever they are kept.

    Attributes:
        parameters: As stored.
        gradients: Once they are summed over ranks.
        optimizer_state: AdamW's moments and its counts of steps.
    """

    parameters: float
    gradients: float
    optimizer_state: float


def own_elements(costs: ModelCosts, config: ParallelConfig, load: StageLoad) -> float:
    """Parameters of a rank of `pp` and `tp`, before any other sharding.

    Args:
        costs: The model.
        config: The layout with every degree resolved.
        load: What the rank runs.
    """
    return load.num_blocks * costs.part_of_block(config.tp) + own_root(costs, config, load)


def own_root(costs: ModelCosts, config: ParallelConfig, load: StageLoad) -> float:
    """Those of them outside of blocks.

    Args:
        costs: The model.
        config: The layout with every degree resolved.
        load: What the rank runs.
    """
    # A last stage has a copy of an embedding that is its head too.
    tables = (costs.embedding if load.has_embedding else 0) + (_head(costs, load) if load.has_head else 0)
    return tables / config.tp + costs.width * load.has_head


def fullest(costs: ModelCosts, config: ParallelConfig) -> StageLoad:
    """The rank of `pp` that holds most of the model.

    Args:
        costs: The model.
        config: The layout with every degree resolved.
    """
    return max(stage_loads(costs, config, 1), key=lambda load: own_elements(costs, config, load))


def predict_states(costs: ModelCosts, config: ParallelConfig, load: StageLoad) -> States:
    """What one rank holds: float32 parameters, gradients and moments over the ranks that share each.

    This is the ledger's to the byte where nothing is filled up and all blocks are alike. Left out are what fills up
    uneven shards, biases and norms of heads.

    Args:
        costs: The model.
        config: The layout with every degree resolved.
        load: What the rank runs.
    """
    own, shards = own_elements(costs, config, load), num_shards(config)
    rows = config.dp_replicate * config.cp if TRAITS[config.data_parallel].splits_optimizer_rows else shards
    tensors = load.num_blocks * costs.tensors + load.has_embedding + load.has_head * (1 + (_head(costs, load) > 0))
    moments = ADAMW.tensors * FLOAT32 * own / rows + ADAMW.numbers * NUMBER_BYTES * tensors
    return States(FLOAT32 * own / shards, FLOAT32 * costs.trained * own / shards, costs.trained * moments)


def _head(costs: ModelCosts, load: StageLoad) -> int:
    return costs.head or (0 if load.has_embedding else costs.embedding)
