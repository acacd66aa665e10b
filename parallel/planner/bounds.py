"""Bounds what a step takes and what a rank holds by the degrees alone, so that few layouts need a closer look."""

from typing import NamedTuple

from parallel.config import DataParallel, Schedule, Strategy
from parallel.planner.candidate import Request
from parallel.planner.constants import Constants
from parallel.planner.costs import FLOAT32, KEEP_INPUT, ModelCosts, kept_bytes
from parallel.planner.links import GB
from parallel.planner.pipeline import bubble
from parallel.planner.timing import STREAM_PASSES, WIDE_PASSES
from parallel.schedules import SCHEDULES
from parallel.traits import TRAITS

BFLOAT16 = 2


class Degrees(NamedTuple):
    """Ranks along each axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


class Kind(NamedTuple):
    """A backend with a strategy.

    Attributes:
        data_parallel: The backend.
        strategy: What it shards.
        in_node: Whether it keeps units sharded within a node after forward.
    """

    data_parallel: DataParallel
    strategy: Strategy | None
    in_node: bool = False


def least_bytes(costs: ModelCosts, request: Request, degrees: Degrees, kind: Kind) -> float:
    """What a rank holds at least: parameters, moments, what stays gathered, and the inputs of its blocks.

    Args:
        costs: The model.
        request: What is to be trained on what.
        degrees: Ranks along each axis.
        kind: Backend and strategy.
    """
    own = costs.total / (degrees.tp * degrees.pp)
    shards = 1 if kind.strategy in (None, "no_shard") else degrees.dp_shard * degrees.cp
    rows = degrees.dp_replicate * degrees.cp if TRAITS[kind.data_parallel].splits_optimizer_rows else shards
    is_whole = degrees.pp > 1 or kind.strategy not in ("full_shard", "hybrid_shard")
    whole = (BFLOAT16 * own if is_whole else 0.0) + (FLOAT32 * own if degrees.pp > 1 else 0.0)
    # A pipeline keeps as many micro-batches as it has less of the blocks.
    num_tokens = request.sequence_length / degrees.cp
    kept = costs.num_layers * num_tokens * kept_bytes(costs, KEEP_INPUT, BFLOAT16, degrees.tp, True)
    return FLOAT32 * own / shards + 2 * FLOAT32 * own / rows + whole + kept / 2


def least_time_s(
    costs: ModelCosts, request: Request, degrees: Degrees, schedule: Schedule | None, constants: Constants
) -> float:
    """What a step takes at least: what every layout computes and moves, what `tp` sends, and the bubble.

    Args:
        costs: The model.
        request: What is to be trained on what.
        degrees: Ranks along each axis.
        schedule: Of the pipeline.
        constants: What shares of the data sheet's figures are reached.
    """
    gpu, (pp, replicas, shards, cp, tp) = request.gpu, degrees
    ranks = replicas * shards
    num_tokens = request.global_batch * request.sequence_length / (ranks * cp)
    flops_per_s = constants.achieved_flops(gpu.peak_tflops["bfloat16"], gpu.power_w)
    layers = costs.num_layers / pp
    matmuls = layers * (costs.block - 2 * costs.width) + (costs.embedding if pp == 1 else 0)
    pairs = 7 * request.sequence_length * costs.query_width * layers / constants.attention_share
    moved = 3 * BFLOAT16 * layers * (STREAM_PASSES * costs.width + WIDE_PASSES * costs.wide)
    if not request.compile or (schedule is not None and SCHEDULES[schedule].splits_backward):
        moved *= constants.eager_passes
    memory_per_s = gpu.memory_gb_per_s * GB * constants.memory_share
    compute_s = num_tokens * ((6 * matmuls + pairs) / flops_per_s + moved / memory_per_s) / tp
    link = (gpu.node_link_gb_per_s if tp <= gpu.gpus_per_node else gpu.network_link_gb_per_s * gpu.gpus_per_node) * GB
    sent = 8 * num_tokens * costs.width * BFLOAT16 * (tp - 1) / tp * layers
    idle = 0.0 if schedule is None else bubble(schedule, pp, request.global_batch // ranks)
    return (compute_s + sent / (link * constants.link_share)) * (1 + idle)
