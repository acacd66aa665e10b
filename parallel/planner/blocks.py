"""Predicts what a block and the head compute: each matrix product, attention and small operation by its roofline."""

from typing import NamedTuple

from parallel.config import ParallelConfig
from parallel.planner.candidate import Candidate
from parallel.planner.constants import Constants
from parallel.planner.costs import FLOAT32, ExpertCosts, ModelCosts
from parallel.planner.hardware import Gpu
from parallel.planner.links import GB
from parallel.precision import Precision

STREAM_PASSES, WIDE_PASSES = 16, 5
"""How often the small operations of a block's forward read or write something as wide as the stream (two norms, two
sums, the rotary embedding, the casts between) and as wide as the feed-forward layer (its activation), when each is one
kernel; backward does twice that."""
LOGIT_PASSES = 10
"""Bytes moved for each logit: two in the compute dtype, two of float32 at a time."""
RING_FORWARD_BYTES, RING_BACKWARD_BYTES = 36, 20
"""Bytes that adding up a step of the ring moves for each element of the queries that it has: in forward the sum so far
and the new part, weighted, in float32; in backward the gradient of the queries, and copies of rows."""

RING_FORWARD_KERNELS, RING_BACKWARD_KERNELS = 12, 14
"""Operations of a step of the ring, counted in its code: the exchange, attention, and what adds up its results."""
COMPILED_KERNELS, EAGER_KERNELS = 20, 60
"""Operations of a block's forward, with those that are not compiled into one apart; backward has twice as many."""


class Speeds(NamedTuple):
    """What a chip does in a second.

    Attributes:
        flops_per_s: Of large matmuls in the dtype of the computation.
        maps_flops_per_s: Of those of linear maps within blocks, which may be in float8.
        bytes_per_s: Of its memory.
        itemsize: Bytes of an element in the dtype of the computation.
        constants: Of which they follow.
    """

    flops_per_s: float
    maps_flops_per_s: float
    bytes_per_s: float
    itemsize: int
    constants: Constants

    def matmul_s(self, num_tokens: float, rows: float, columns: float) -> float:
        """Time of one product of tokens and a matrix: bound by arithmetic, or where that is thin by memory.

        Args:
            num_tokens: Tokens.
            rows: Components of each.
            columns: Components of each result.
        """
        moved = self.itemsize * (num_tokens * (rows + columns) + rows * columns)
        return max(2 * num_tokens * rows * columns / self.maps_flops_per_s, moved / self.bytes_per_s)


def speeds_of(config: ParallelConfig, gpu: Gpu, constants: Constants) -> Speeds:
    """What a chip does in a second under a layout.

    Args:
        config: The layout, of which the dtype counts.
        gpu: The chip.
        constants: What shares of the data sheet's figures are reached.

    Raises:
        ValueError: If its peak is not known for the dtype.
    """
    stored = config.precision.compute == "stored"
    flops, of_maps = flops_of(config.precision, gpu, constants)
    return Speeds(
        flops, of_maps, gpu.memory_gb_per_s * GB * constants.memory_share, FLOAT32 if stored else 2, constants
    )


def flops_of(precision: Precision, gpu: Gpu, constants: Constants) -> tuple[float, float]:
    """FLOP/s that large matmuls reach, in the dtype of the computation, and those of linear maps within blocks.

    Args:
        precision: Of the layout.
        gpu: The chip.
        constants: What shares of the data sheet's figures are reached.

    Raises:
        ValueError: If its peak is not known for a dtype.
    """
    peak = gpu.peak("float32" if precision.compute == "stored" else precision.compute)
    flops = constants.achieved_flops(peak, gpu.power_w)
    # Assumed: float8 reaches the same share of its peak, where power limits a chip too.
    return flops, flops * gpu.peak("float8") / peak if precision.float8 else flops


def of_block(
    costs: ModelCosts, candidate: Candidate, num_tokens: int, sequence_length: int, speeds: Speeds
) -> tuple[float, float, float]:
    """Seconds of one block for one micro-batch: matmuls, attention, small operations; forward, backward and again.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
        num_tokens: Tokens of a micro-batch on this rank.
        sequence_length: Tokens of a sequence.
        speeds: What the chip does in a second.
    """
    config, recompute = candidate.config, candidate.recompute
    tp, width = config.tp, costs.width
    # Forward multiplies by each matrix once, backward for the gradient of its input, and for its own if it is trained.
    products = 2 + costs.trained
    matmul_s = (2 * products + recompute.again[0]) * speeds.matmul_s(num_tokens, width, costs.query_width / tp)
    matmul_s += (2 * products + recompute.again[1]) * speeds.matmul_s(num_tokens, width, costs.kv_width / tp)
    experts = costs.experts
    runs = 3 * products + recompute.again[2]
    if experts is None:
        matmul_s += runs * speeds.matmul_s(num_tokens, width, costs.wide / tp)
    else:
        matmul_s += runs * (1 - experts.share) * speeds.matmul_s(num_tokens, width, experts.dense / tp)
        matmul_s += runs * experts.share * _experts_s(experts, width, num_tokens, config, speeds)
    attention_s, added_s = _attention(costs, candidate, num_tokens, sequence_length, speeds)
    stream = width / (tp if config.sequence_parallel else 1)
    passes = 3.0 if recompute.checkpointing == "none" else 4.0
    passes *= 1 if config.compile else speeds.constants.eager_passes
    if experts is not None:
        # Tokens are sorted by expert, and their results are added up.
        stream += experts.share * experts.chosen * width / 4
    moved = passes * num_tokens * speeds.itemsize * (STREAM_PASSES * stream + WIDE_PASSES * costs.wide / tp)
    small_s = moved / speeds.bytes_per_s
    launched = (3 if recompute.checkpointing == "none" else 4) * (COMPILED_KERNELS if config.compile else EAGER_KERNELS)
    # Where operations are so small that they take no longer than their launch, that is what binds.
    small_s += max(0.0, launched * speeds.constants.kernel_s - matmul_s - attention_s - small_s)
    return matmul_s, attention_s, small_s + added_s


def _experts_s(experts: ExpertCosts, width: int, num_tokens: int, config: ParallelConfig, speeds: Speeds) -> float:
    """One of the three products of a layer with experts: a rank reads all weights that it has, however few tokens."""
    columns = experts.width / config.tp
    flops = 2 * num_tokens * experts.chosen * width * columns
    weights = experts.number / config.ep * width * columns
    moved = speeds.itemsize * (weights + num_tokens * experts.chosen * (width + columns))
    routed_s = max(flops / (speeds.flops_per_s * speeds.constants.grouped_share), moved / speeds.bytes_per_s)
    return routed_s + (speeds.matmul_s(num_tokens, width, experts.shared / config.tp) if experts.shared else 0.0)


def _attention(
    costs: ModelCosts, candidate: Candidate, num_tokens: int, sequence_length: int, speeds: Speeds
) -> tuple[float, float]:
    """Seconds of attention, and of what a ring does to add up its parts."""
    config, cp = candidate.config, candidate.config.cp
    # Half of the products are masked; backward of fused attention takes five matmuls for the forward's two.
    forward = 2 * num_tokens * sequence_length * costs.query_width / config.tp
    runs = 3.5 if candidate.recompute.keeps_attention else 4.5
    attention_s = runs * forward / (speeds.flops_per_s * speeds.constants.attention_share)
    if config.cp_method == "allgather":
        # The last rank's queries see nearly all keys, where those of a whole sequence see half of them on average.
        return attention_s * (2 * cp - 1) / cp, 0.0
    if config.cp_method == "ring":
        # All queries see an earlier rank's keys, half of them a later one's.
        queries = num_tokens * costs.query_width / config.tp * (1 + 0.75 * (cp - 1))
        forwards = runs - 2.5
        moved = queries * (forwards * RING_FORWARD_BYTES + RING_BACKWARD_BYTES)
        launched = cp * (forwards * RING_FORWARD_KERNELS + RING_BACKWARD_KERNELS) * speeds.constants.kernel_s
        added_s = max(moved / speeds.bytes_per_s, launched)
        return attention_s / speeds.constants.ring_share, added_s
    return attention_s, 0.0


def of_head(costs: ModelCosts, config: ParallelConfig, num_tokens: int, speeds: Speeds) -> tuple[float, float]:
    """Seconds of the head for one micro-batch: its matmuls, and what is done with logits.

    Args:
        costs: The model.
        config: The layout.
        num_tokens: Tokens of a micro-batch on this rank.
        speeds: What the chip does in a second.
    """
    logits = num_tokens * costs.vocab_size / config.tp
    flops = 2 * (2 + costs.trained) * logits * costs.width
    return flops / speeds.flops_per_s, LOGIT_PASSES * logits / speeds.bytes_per_s
