"""Bounds what a step takes and what a rank holds by the degrees alone, so that few layouts need a closer look."""

from typing import NamedTuple

from parallel.config import DataParallel, Schedule, Strategy
from parallel.planner.blocks import RING_BACKWARD_KERNELS, RING_FORWARD_KERNELS, STREAM_PASSES, WIDE_PASSES, flops_of
from parallel.planner.candidate import Request, precision_of
from parallel.planner.constants import Constants
from parallel.planner.costs import BFLOAT16, FLOAT32, KEEP_INPUT, ModelCosts, kept_bytes
from parallel.planner.hardware import Gpu
from parallel.planner.links import GB, Link
from parallel.planner.pipeline import bubble
from parallel.schedules import SCHEDULES
from parallel.traits import TRAITS


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
        offloads: Whether it keeps states in host memory.
    """

    data_parallel: DataParallel
    strategy: Strategy | None
    offloads: bool = False


def least_bytes(costs: ModelCosts, request: Request, degrees: Degrees, kind: Kind) -> float:
    """What a rank holds at least: parameters, moments, what stays gathered, and the inputs of its blocks.

    Args:
        costs: The model.
        request: What is to be trained on what.
        degrees: Ranks along each axis.
        kind: Backend and strategy.
    """
    itemsize = FLOAT32 if request.compute == "stored" else BFLOAT16
    own = costs.total / (degrees.tp * degrees.pp)
    trained = costs.trained * own
    shards = 1 if kind.strategy in (None, "no_shard") else degrees.dp_shard * degrees.cp
    rows = degrees.dp_replicate * degrees.cp if TRAITS[kind.data_parallel].splits_optimizer_rows else shards
    is_whole = degrees.pp > 1 or kind.strategy not in ("full_shard", "hybrid_shard")
    # Whole parameters in their own dtype are no copy where the backend has no units.
    copied = TRAITS[kind.data_parallel].shards or itemsize == BFLOAT16
    whole = (itemsize * own if is_whole and copied else 0.0) + (FLOAT32 * trained if degrees.pp > 1 else 0.0)
    # A pipeline keeps as many micro-batches as it has less of the blocks.
    num_tokens = request.sequence_length / degrees.cp
    kept = costs.num_layers * num_tokens * kept_bytes(costs, KEEP_INPUT, itemsize, degrees.tp, True)
    states = 0.0 if kind.offloads else FLOAT32 * own / shards + 2 * FLOAT32 * trained / rows
    return states + whole + kept / 2


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
    itemsize = FLOAT32 if request.compute == "stored" else BFLOAT16
    ranks = replicas * shards
    num_tokens = request.global_batch * request.sequence_length / (ranks * cp)
    flops_per_s, fastest_per_s = flops_of(precision_of(request.compute), gpu, constants)
    layers = costs.num_layers / pp
    of_block = 2 * costs.width * (costs.query_width + costs.kv_width) + 3 * costs.width * costs.wide
    matmuls = layers * of_block + (costs.embedding if pp == 1 else 0)
    pairs = 7 * request.sequence_length * costs.query_width * layers / constants.attention_share
    moved = 3 * itemsize * layers * (STREAM_PASSES * costs.width + WIDE_PASSES * costs.wide)
    if not request.compile or (schedule is not None and SCHEDULES[schedule].splits_backward):
        moved *= constants.eager_passes
    memory_per_s = gpu.memory_gb_per_s * GB * constants.memory_share
    attention_s = num_tokens * pairs / flops_per_s / tp
    matmuls_s = 2 * (2 + costs.trained) * matmuls / fastest_per_s
    compute_s = num_tokens * (matmuls_s + moved / memory_per_s) / tp + attention_s
    sent_s = layers * Link(tp, 1, gpu, constants).time_s("all_gather", 8 * num_tokens * costs.width * itemsize, 8)
    if cp > 1:
        sent_s += layers * _least_of_context(
            costs, degrees, num_tokens * itemsize, attention_s / layers, gpu, constants
        )
    idle = 0.0 if schedule is None else bubble(schedule, pp, request.global_batch // ranks)
    return (compute_s + sent_s) * (1 + idle)


def _least_of_context(
    costs: ModelCosts, degrees: Degrees, token_bytes: float, attention_s: float, gpu: Gpu, constants: Constants
) -> float:
    """What the cheapest way to share sequences adds to a block, all of its micro-batches together."""
    cp, tp = degrees.cp, degrees.tp
    link = Link(cp, tp, gpu, constants)
    keys, queries = (2 * width / tp * token_bytes for width in (costs.kv_width, costs.query_width))
    launched = cp * (RING_FORWARD_KERNELS + RING_BACKWARD_KERNELS) * constants.kernel_s
    return min(
        attention_s * (1 / constants.ring_share - 1) + launched,
        attention_s * (cp - 1) / cp + link.time_s("all_gather", 2 * keys * cp, 2),
        link.time_s("all_to_all", 2 * (keys + queries), 4),
    )
