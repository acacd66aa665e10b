"""Predicts the time of a step: a roofline of each block, and what its collectives add to that."""

from typing import NamedTuple

from parallel.config import ParallelConfig
from parallel.ledger.parts import num_shards
from parallel.ledger.states import ADAM_MOMENTS
from parallel.planner.blocks import Speeds, of_block, of_head, speeds_of
from parallel.planner.candidate import Candidate, Options
from parallel.planner.constants import Constants
from parallel.planner.costs import FLOAT32, ModelCosts
from parallel.planner.gathering import Work, data_parallel_s, host_s
from parallel.planner.hardware import Gpu
from parallel.planner.pipeline import blocks_of_ranks, bubble
from parallel.planner.states import fullest
from parallel.planner.waiting import (
    Ranks,
    between_stages_s,
    context_parallel_s,
    ends_of_tensor_parallel_s,
    expert_parallel_s,
    tensor_parallel_s,
)
from parallel.schedules import traits_of


class Time(NamedTuple):
    """Where the seconds of a step go.

    Attributes:
        matmul_s: Matrix products, those that are computed again included.
        attention_s: Fused attention.
        memory_s: Small operations and the optimizer, bound by memory.
        tp_s: Waiting for ranks that share matrices.
        cp_s: Waiting for ranks that share sequences.
        ep_s: Waiting for ranks that share experts.
        pp_s: Sending between stages.
        bubble_s: Idling in the pipeline.
        dp_s: Waiting for parameters and gradients, as far as no computation hides it.
        host_s: Moving states between GPU and host, and updating them there.
    """

    matmul_s: float
    attention_s: float
    memory_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    pp_s: float
    bubble_s: float
    dp_s: float
    host_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self)


class Computed(NamedTuple):
    """What a step takes whatever its options.

    Attributes:
        time: With no time for parameters and gradients.
        work: What can hide those.
        step_s: Sum of `time`.
        optimizer_s: What the optimizer takes of it.
    """

    time: Time
    work: Work
    step_s: float
    optimizer_s: float


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
    computed = compute_time(costs, candidate, sequence_length, gpu, constants, ranks)
    dp_s, in_host_s = with_options(costs, candidate, candidate.options, computed, constants, ranks)
    return computed.time._replace(dp_s=dp_s, host_s=in_host_s)


def with_options(
    costs: ModelCosts, candidate: Candidate, options: Options, computed: Computed, constants: Constants, ranks: Ranks
) -> tuple[float, float]:
    """What options decide on: seconds for parameters and gradients, and for states in host memory.

    Args:
        costs: The model.
        candidate: The layout and what varies within it, options left out.
        options: How it groups and sends.
        computed: What the step takes beside that.
        constants: What shares of the data sheet's figures are reached.
        ranks: The links of the layout.
    """
    dp_s = data_parallel_s(costs, candidate, options, computed.work, ranks, constants)
    return dp_s, host_s(costs, candidate, computed.work.load, ranks.gpu)


def compute_time(
    costs: ModelCosts, candidate: Candidate, sequence_length: int, gpu: Gpu, constants: Constants, ranks: Ranks
) -> Computed:
    """What a step takes but for parameters and gradients.

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
    speeds = speeds_of(config, gpu, constants)
    block = of_block(costs, candidate, num_tokens, sequence_length, speeds)
    head = of_head(costs, config, num_tokens, speeds)
    blocks, with_head = _busiest(costs, config, sum(block), sum(head))
    embeds = config.pp == 1 or (with_head and traits_of(config).is_v)
    matmul_s, attention_s, memory_s = (
        times * (blocks * each + with_head * last) for each, last in zip(block, (head[0], 0.0, head[1]), strict=True)
    )
    tp_s, cp_s, ep_s, pp_s = (
        times * each
        for each in (
            blocks * tensor_parallel_s(costs, candidate, num_tokens, ranks.tp)
            + ends_of_tensor_parallel_s(costs, candidate, num_tokens, ranks.tp, embeds, with_head),
            blocks * context_parallel_s(costs, candidate, num_tokens, ranks.cp, block[1], constants),
            blocks * expert_parallel_s(costs, candidate, num_tokens, ranks.ep),
            between_stages_s(costs, candidate, num_tokens, ranks.pp),
        )
    )
    compute_s = matmul_s + attention_s + memory_s
    work_s = compute_s + tp_s + cp_s + ep_s + pp_s
    optimizer_s = _optimizer_s(costs, config, blocks, speeds)
    time = Time(
        matmul_s=matmul_s,
        attention_s=attention_s,
        memory_s=memory_s + optimizer_s,
        tp_s=tp_s,
        cp_s=cp_s,
        ep_s=ep_s,
        pp_s=pp_s,
        bubble_s=0.0 if config.schedule is None else work_s * bubble(config.schedule, config.pp, times),
        dp_s=0.0,
        host_s=0.0,
    )
    return Computed(time, Work(fullest(costs, config), sum(block) / 3, compute_s + tp_s), time.step_s, optimizer_s)


def _busiest(costs: ModelCosts, config: ParallelConfig, block_s: float, head_s: float) -> tuple[int, bool]:
    """Blocks of the rank that has most to do, and whether it has the head."""
    if config.pp == 1:
        return costs.num_layers, True
    first, middle, last = blocks_of_ranks(costs, config)
    # Both ends of a V are the first rank's.
    with_head = first if traits_of(config).is_v else last
    most = max(first, middle)
    return (with_head, True) if with_head * block_s + head_s >= most * block_s else (most, False)


def _optimizer_s(costs: ModelCosts, config: ParallelConfig, blocks: int, speeds: Speeds) -> float:
    if config.sharding.cpu_offload:
        return 0.0
    root = costs.embedding + costs.head if config.pp == 1 else costs.embedding
    held = (blocks * costs.part_of_block(config.tp) + root / config.tp) / num_shards(config)
    # AdamW reads parameter, gradient and moments, and writes parameter and moments.
    return (3 + 2 * ADAM_MOMENTS) * FLOAT32 * costs.trained * held / speeds.bytes_per_s
