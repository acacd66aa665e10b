"""Predicts how training speeds up with data-parallel ranks and what share of it is communication, for the claims."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from parallel.config import DataParallel, ParallelConfig
from parallel.plan import ModelShape
from parallel.planner.candidate import Candidate, Options
from parallel.planner.choices import BUCKETS_MB
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import KEEP_ALL, KEEP_INPUT, model_costs
from parallel.planner.hardware import Gpu
from parallel.planner.timing import Time, compute_time, predict_time
from parallel.planner.waiting import join_ranks
from parallel.precision import Precision
from parallel.traits import TRAITS

TRAFFIC_SHARES = (("7B", 8, 0.25), ("13B", 16, 0.30), ("70B", 64, 0.40), ("175B", 256, 0.50))
"""Model, GPUs, and the share of time in communication that tutorials print."""
NAMES = {"7B": "llama2-7b", "13B": "llama2-13b", "70B": "llama3.1-70b", "175B": "gpt-175b"}
TOKENS = 4096


class Share(NamedTuple):
    """Communication of a step.

    Attributes:
        exposed: Share of the step that is waited.
        sent: Share of the step's time that collectives are under way.
    """

    exposed: float
    sent: float


def time_of(shape: ModelShape, gpu: Gpu, backend: DataParallel, ranks: int, sequences: int = 1) -> Time:
    """A step of data parallel alone, whether it fits or not.

    Args:
        shape: The model.
        gpu: What runs it.
        backend: `ddp`, or one that shards.
        ranks: Data-parallel ranks.
        sequences: Of `TOKENS` tokens, on each.
    """
    candidate, costs = _candidate(backend, ranks, sequences), model_costs(shape)
    links = join_ranks(candidate.config, gpu, CONSTANTS)
    sizes = BUCKETS_MB if TRAITS[backend].has_buckets else BUCKETS_MB[:1]
    tried = (candidate._replace(options=Options(bucket_cap_mb=size)) for size in sizes)
    return min(
        (predict_time(costs, each, TOKENS, gpu, CONSTANTS, links) for each in tried), key=lambda time: time.step_s
    )


def speedups(shape: ModelShape, gpu: Gpu, backend: DataParallel, ranks: Sequence[int]) -> list[float]:
    """Throughput over that of one GPU, with as many tokens on each.

    Args:
        shape: The model.
        gpu: What runs it.
        backend: `ddp`, or one that shards.
        ranks: Numbers of GPUs.
    """
    alone_s = time_of(shape, gpu, backend, 1).step_s
    return [each * alone_s / time_of(shape, gpu, backend, each).step_s for each in ranks]


def needed_bandwidth(shape: ModelShape, gpu: Gpu, backend: DataParallel, ranks: int, target: float) -> float | None:
    """What a GPU's links would have to carry for a speed-up, in GB/s; None where no bandwidth gives so much.

    Args:
        shape: The model.
        gpu: What runs it; all of its links get that bandwidth.
        backend: `ddp`, or one that shards.
        ranks: Number of GPUs.
        target: The speed-up.
    """

    def reached(gb_per_s: float) -> float:
        slow = replace(gpu, node_link_gb_per_s=gb_per_s, network_link_gb_per_s=gb_per_s, gpus_per_node=1)
        return speedups(shape, slow, backend, [ranks])[0]

    low, high = 0.01, 10_000.0
    if reached(high) < target:
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if reached(middle) < target else (low, middle)
    return high * CONSTANTS.link_share


def communication_share(
    shape_of: Callable[[str], ModelShape], name: str, ranks: int, gpu: Gpu, tokens_of_step: int | None = None
) -> Share:
    """What of a full_shard step is communication.

    Args:
        shape_of: Gives the shape of a model by its name.
        name: A size that tutorials name.
        ranks: GPUs.
        gpu: Their kind.
        tokens_of_step: Tokens of all GPUs; None: two sequences on each.
    """
    sequences = 2 if tokens_of_step is None else max(1, tokens_of_step // TOKENS // ranks)
    costs, candidate = model_costs(shape_of(NAMES[name])), _candidate("fsdp2", ranks, sequences)
    links = join_ranks(candidate.config, gpu, CONSTANTS)
    time = predict_time(costs, candidate, TOKENS, gpu, CONSTANTS, links)
    alone = CONSTANTS._replace(overlap=0.0, interference=0.0)
    computed = compute_time(costs, candidate, TOKENS, gpu, alone, links)
    sent = predict_time(costs, candidate, TOKENS, gpu, alone, links).step_s - computed.step_s
    return Share(exposed=time.dp_s / time.step_s, sent=min(1.0, sent / time.step_s))


def _candidate(backend: DataParallel, ranks: int, sequences: int) -> Candidate:
    shards = TRAITS[backend].shards and ranks > 1
    config = ParallelConfig(
        dp_shard=ranks if shards else 1,
        dp_replicate=1 if shards else ranks,
        data_parallel="none" if ranks == 1 else backend,
        precision=Precision(compute="bfloat16", reduce="float32"),
        compile=True,
    )
    return Candidate(config, KEEP_INPUT if sequences > 1 else KEEP_ALL, "every_micro_batch", sequences, 1, Options())
