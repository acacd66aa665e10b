"""Predicts the time of a step: a roofline of each block, and what its collectives add to that."""

from typing import NamedTuple

from parallel.config import ParallelConfig
from parallel.ledger.parts import num_shards
from parallel.ledger.states import ADAM_MOMENTS
from parallel.planner.candidate import Candidate
from parallel.planner.constants import Constants
from parallel.planner.costs import FLOAT32, ModelCosts
from parallel.planner.hardware import Gpu
from parallel.planner.links import GB
from parallel.planner.pipeline import bubble, most_blocks
from parallel.planner.waiting import (
    Ranks,
    between_stages_s,
    context_parallel_s,
    data_parallel_s,
    exposed,
    tensor_parallel_s,
)

STREAM_PASSES, WIDE_PASSES = 16, 5
"""How often the small operations of a block's forward read or write something as wide as the stream (two norms, two
sums, the rotary embedding, the casts between) and as wide as the feed-forward layer (its activation), when each is one
kernel; backward does twice that."""
LOGIT_PASSES = 10
"""Bytes moved for each logit: two in the compute dtype, two of float32 at a time."""


class Time(NamedTuple):
    """Where the seconds of a step go.

    Attributes:
        matmul_s: Matrix products, those that are computed again included.
        attention_s: Fused attention.
        memory_s: Small operations and the optimizer, bound by memory.
        tp_s: Waiting for ranks that share matrices.
        cp_s: Waiting for ranks that share sequences.
        pp_s: Sending between stages.
        dp_s: Waiting for parameters and gradients, as far as no computation hides it.
        bubble_s: Idling in the pipeline.
    """

    matmul_s: float
    attention_s: float
    memory_s: float
    tp_s: float
    cp_s: float
    pp_s: float
    dp_s: float
    bubble_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self)


def predict_time(
    costs: ModelCosts, candidate: Candidate, sequence_length: int, gpu: Gpu, constants: Constants, ranks: Ranks
) -> Time:
    """The time of a step of the rank that has most to do.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
        sequence_length: Tokens of a sequence.
        gpu: What runs it.
        constants: What shares of the data sheet's figures are reached.
        ranks: The links of the layout.
    """
    config, times = candidate.config, candidate.num_micro_batches
    num_tokens = candidate.micro_batch * sequence_length // config.cp
    itemsize = FLOAT32 if config.precision.compute == "stored" else 2
    of_block = _compute(costs, candidate, num_tokens, sequence_length, gpu, constants)
    head_s, logits_s = _head(costs, config, num_tokens, gpu, constants)
    blocks, last = (costs.num_layers, costs.num_layers) if config.pp == 1 else most_blocks(costs, config)
    if last * sum(of_block) + head_s + logits_s >= blocks * sum(of_block):
        blocks = last
    else:
        head_s = logits_s = 0.0
    matmul_s, attention_s, memory_s = (blocks * each for each in of_block)
    matmul_s, memory_s = matmul_s + head_s, memory_s + logits_s
    compute_s = matmul_s + attention_s + memory_s
    tp_s = blocks * tensor_parallel_s(costs, candidate, num_tokens, itemsize, ranks.tp)
    cp_s = context_parallel_s(costs, candidate, num_tokens, itemsize, ranks.cp, blocks, attention_s, constants)
    pp_s = between_stages_s(costs, config, num_tokens, itemsize, ranks.pp)
    sent_s = data_parallel_s(costs, candidate, blocks, itemsize, ranks)
    dp_s = exposed(sent_s, times * (compute_s + tp_s), constants)
    work_s = times * (compute_s + tp_s + cp_s + pp_s)
    root = costs.embedding + costs.head if config.pp == 1 else costs.embedding
    held = (blocks * costs.block + root) / config.tp / num_shards(config)
    # AdamW reads parameter, gradient and moments, and writes parameter and moments.
    optimizer_s = (3 + 2 * ADAM_MOMENTS) * FLOAT32 * held / (gpu.memory_gb_per_s * GB * constants.memory_share)
    return Time(
        matmul_s=times * matmul_s,
        attention_s=times * attention_s,
        memory_s=times * memory_s + optimizer_s,
        tp_s=times * tp_s,
        cp_s=times * cp_s,
        pp_s=times * pp_s,
        dp_s=dp_s,
        bubble_s=0.0 if config.schedule is None else work_s * bubble(config.schedule, config.pp, times),
    )


def _compute(
    costs: ModelCosts, candidate: Candidate, num_tokens: int, sequence_length: int, gpu: Gpu, constants: Constants
) -> tuple[float, float, float]:
    """Seconds of one block for one micro-batch: matmuls, attention, small operations; forward, backward and again."""
    config, recompute = candidate.config, candidate.recompute
    tp, flops_per_s = config.tp, _flops_per_s(config, gpu, constants)
    query, key, wide = costs.query_width / tp, costs.kv_width / tp, costs.wide / tp
    once = 2 * query + 2 * key + 3 * wide
    again = sum(count * width for count, width in zip(recompute.again, (query, key, wide), strict=True))
    memory_per_s = gpu.memory_gb_per_s * GB * constants.memory_share
    itemsize = FLOAT32 if config.precision.compute == "stored" else 2
    # Few tokens take as long as reading the weights does.
    per_element_s = max(2 * num_tokens / flops_per_s, itemsize / memory_per_s)
    matmul_s = costs.width * (3 * once + again) * per_element_s
    # Half of the products are masked; backward of fused attention takes five matmuls for the forward's two.
    forward = 2 * num_tokens * sequence_length * costs.query_width / tp
    runs = 3.5 if recompute.keeps_attention else 4.5
    attention_s = runs * forward / (flops_per_s * constants.attention_share)
    stream = costs.width / (tp if config.sequence_parallel else 1)
    passes = 3.0 if recompute.checkpointing == "none" else 4.0
    passes *= 1 if config.compile else constants.eager_passes
    moved = passes * num_tokens * itemsize * (STREAM_PASSES * stream + WIDE_PASSES * costs.wide / tp)
    return matmul_s, attention_s, moved / memory_per_s


def _head(
    costs: ModelCosts, config: ParallelConfig, num_tokens: int, gpu: Gpu, constants: Constants
) -> tuple[float, float]:
    """Seconds of the head for one micro-batch: its matmuls, and what is done with logits."""
    logits = num_tokens * costs.vocab_size / config.tp
    matmul_s = 6 * logits * costs.width / _flops_per_s(config, gpu, constants)
    return matmul_s, LOGIT_PASSES * logits / (gpu.memory_gb_per_s * GB * constants.memory_share)


def _flops_per_s(config: ParallelConfig, gpu: Gpu, constants: Constants) -> float:
    dtype = "bfloat16" if config.precision.compute == "bfloat16" else "float32"
    if dtype not in gpu.peak_tflops:
        raise ValueError(f"GPU {gpu.name!r} has no peak_tflops for {dtype}; legal: {', '.join(gpu.peak_tflops)}")
    return constants.achieved_flops(gpu.peak_tflops[dtype], gpu.power_w)
