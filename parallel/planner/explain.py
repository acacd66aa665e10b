"""Says why a plan is the best one, what would make it better, and what to do where none fits."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, get_args

from parallel.config import DEGREES
from parallel.ledger.parts import num_shards
from parallel.planner.accounting import Accounting, state_bytes
from parallel.planner.candidate import BUCKET_CAP_MB, Candidate, Request
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import model_costs
from parallel.planner.hardware import Gpu
from parallel.planner.ranking import Plan, evaluate
from parallel.planner.search import Found, search, smallest
from parallel.traits import TRAITS

PARTS = {
    "matmul_s": "matrix products",
    "attention_s": "attention",
    "memory_s": "small operations, bound by memory bandwidth",
    "tp_s": "traffic of tp",
    "cp_s": "traffic of cp",
    "ep_s": "traffic of ep",
    "pp_s": "traffic of pp",
    "dp_s": "traffic of parameters and gradients that nothing hides",
    "bubble_s": "idling in the pipeline",
    "host_s": "states that go to host memory and back",
}
"""What the parts of a step's time are, in words."""
TIGHT = 0.9
"""Share of the usable memory from which on memory counts as what binds."""
MOST_GPUS = 1 << 17
"""GPUs of the largest job that is planned: as many as the ledger looks at, and more than any has."""
NEIGHBOURS = 64
"""Numbers of GPUs that are tried on either side, where no layout is legal."""


class Advice(NamedTuple):
    """A change and what it would bring.

    Attributes:
        change: In words.
        tokens_per_s: For each GPU, with the change.
    """

    change: str
    tokens_per_s: float


def count_states(plan: Plan) -> dict[Accounting, float]:
    """Bytes of parameters, gradients and optimizer state on a GPU, by each accounting.

    Args:
        plan: A plan.
    """
    config = plan.candidate.config
    zero1 = TRAITS[config.data_parallel].splits_optimizer_rows
    names = {"hybrid_shard": "full_shard", "hybrid_shard_zero2": "shard_grad_op"}
    strategy = "zero1" if zero1 else names.get(config.resolved_strategy, config.resolved_strategy)
    ranks = config.dp_replicate * config.cp if zero1 else num_shards(config)
    own = model_costs(plan.request.shape).total / (config.tp * config.pp)
    frozen = plan.request.frozen
    return {each: state_bytes(each, strategy, own, ranks, frozen=frozen) for each in get_args(Accounting)}


def what_binds(plan: Plan) -> str:
    """The largest part of a step's time, and the largest one beside computing.

    Args:
        plan: A plan that fits.
    """
    time = plan.time._asdict()
    largest = max(time, key=lambda name: time[name])
    other = max((name for name in time if name not in ("matmul_s", "attention_s")), key=lambda name: time[name])
    words = f"{PARTS[largest]} ({time[largest] / plan.time.step_s:.0%} of a step)"
    if other != largest:
        words += f", then {PARTS[other]} ({time[other] / plan.time.step_s:.0%})"
    used = plan.memory.reserved / plan.request.usable_bytes
    return f"{words}; memory, {used:.0%} of what may be used" if used > TIGHT else words


def why_behind(best: Plan, other: Plan) -> str:
    """What another plan loses most by.

    Args:
        best: The plan that won.
        other: The one behind it.
    """
    if other.time.step_s < best.time.step_s and not other.unvalidated:
        return (
            f"{1 - best.ranked_s / other.ranked_s:.1%} behind with the allowance for what is not plain; predicted "
            f"{other.tokens_per_s / best.tokens_per_s - 1:+.1%}"
        )
    if other.time.step_s < best.time.step_s:
        return (
            f"{1 - best.ranked_s / other.ranked_s:.1%} behind with the allowance for what no published result "
            f"checks ({', '.join(other.unvalidated)}); predicted {other.tokens_per_s / best.tokens_per_s - 1:+.1%}"
        )
    ours, theirs = best.time._asdict(), other.time._asdict()
    name = max(PARTS, key=lambda part: theirs[part] - ours[part])
    if other.time.step_s - best.time.step_s < 1e-3 * best.time.step_s:
        return "as fast, but no smaller"
    return f"{theirs[name] - ours[name]:.3g} s more of {PARTS[name]} a step"


def advise(plan: Plan) -> tuple[Advice, ...]:
    """What one change would bring: faster links with the same plan, and more memory with the best plan for it.

    Args:
        plan: The best plan.
    """
    request, gpu = plan.request, plan.request.gpu
    links = {
        "twice the bandwidth between nodes": replace(gpu, network_link_gb_per_s=2 * gpu.network_link_gb_per_s),
        "twice the bandwidth within a node": replace(gpu, node_link_gb_per_s=2 * gpu.node_link_gb_per_s),
    }
    costs = model_costs(request.shape, request.frozen)
    found = [
        Advice(change, evaluate(replace(request, gpu=each), costs, plan.candidate, CONSTANTS).tokens_per_s)
        for change, each in links.items()
    ]
    times, enough = 1 + 1e-9, plan.ranked_s
    larger = {
        # The plan itself fits more memory, and takes a batch twice as large in twice the time.
        "half as much memory again": (replace(request, gpu=replace(gpu, memory_gib=1.5 * gpu.memory_gib)), enough),
        "twice the global batch": (replace(request, global_batch=2 * request.global_batch), 2 * enough),
        "twice the GPUs and the global batch": (
            replace(request, num_gpus=2 * request.num_gpus, global_batch=2 * request.global_batch),
            math.inf,
        ),
    }
    for change, (each, limit_s) in larger.items():
        found += [Advice(change, best.tokens_per_s) for best in search(each, most=1, limit_s=times * limit_s).plans]
    return tuple(sorted(found, key=lambda advice: -advice.tokens_per_s))


def refusal(request: Request, found: Found, gpus: dict[str, Gpu]) -> str:
    """Why nothing works, and the nearest that would, with what is missing in bytes.

    Args:
        request: What was asked for.
        found: The search that found nothing.
        gpus: The table of GPUs.
    """
    least = smallest(request)
    if least is None:
        reason = (
            f"no degrees multiply to {request.num_gpus} GPUs, fit the model and give each data-parallel rank as many "
            f"of {request.global_batch} sequences"
        )
        return f"{reason}; nearest that works: {_nearest(_other_numbers(request))}"
    missing, in_host = least.memory.reserved - request.usable_bytes, least.memory.host - request.gpu.host_memory_bytes
    ways = f"nothing fits: of {found.num_degrees} ways to split, the smallest"
    reason = (
        f"{ways} needs {least.memory.reserved:.0f} bytes a GPU ({describe(least)}), {missing:.0f} bytes more than the "
        f"{request.usable_bytes:.0f} that may be used of a {request.gpu.name}"
    )
    if missing <= 0:
        reason = (
            f"{ways} on the GPU ({describe(least)}) needs {least.memory.host:.0f} bytes of host memory for each, "
            f"{in_host:.0f} bytes more than the {request.gpu.host_memory_bytes:.0f} that {request.gpu.name} has"
        )
    return f"{reason}; nearest that works: {_nearest(_larger(request, gpus))}"


def describe(plan: Plan) -> str:
    """A plan's layout in a few words.

    Args:
        plan: A plan.
    """
    config, candidate, options = plan.candidate.config, plan.candidate, plan.candidate.options
    words: list[str] = [config.data_parallel, config.strategy or ""]
    words += [f"{axis} {getattr(config, axis)}" for axis in DEGREES if getattr(config, axis) > 1]
    words += ["without sequence parallel"] if not config.sequence_parallel else []
    words += [config.schedule or "", config.cp_method or ""]
    words += [f"recompute {candidate.recompute.name}"]
    words += [f"units {options.units}"] if options.units != "block" else []
    words += [f"reshard_group {options.reshard_group}"] if options.reshard_group else []
    words += [f"prefetch {options.prefetch}"] if options.prefetch else []
    words += [f"buckets {options.bucket_cap_mb:g} MiB"] if options.bucket_cap_mb != BUCKET_CAP_MB else []
    words += ["sums in bfloat16"] if options.reduce == "bfloat16" else []
    words += ["states in host memory"] if config.sharding.cpu_offload else []
    words += ["gradients summed once"] if _sums_late(candidate) else []
    return " ".join(each for each in words if each)


def _sums_late(candidate: Candidate) -> bool:
    """Whether gradients stay whole over the micro-batches though they need not."""
    layout = candidate.layout()
    return layout.reduce_gradients == "last"


def _nearest(requests: Iterator[tuple[str, Request]]) -> str:
    working = (words for words, request in requests if search(request, most=1).plans)
    return next(working, "none found")


def _other_numbers(request: Request) -> Iterator[tuple[str, Request]]:
    for distance in range(1, NEIGHBOURS + 1):
        for number in (request.num_gpus - distance, request.num_gpus + distance):
            if 0 < number <= MOST_GPUS:
                yield f"{number} GPUs", replace(request, num_gpus=number)
    # What most models and batches divide, the largest first.
    for exponent in range(request.num_gpus.bit_length() - 1, -1, -1):
        yield f"{1 << exponent} GPUs", replace(request, num_gpus=1 << exponent)


def _larger(request: Request, gpus: dict[str, Gpu]) -> Iterator[tuple[str, Request]]:
    """More GPUs first, then larger ones, then less work; other numbers where the batch allows no multiple."""
    for times in (2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256):
        if times * request.num_gpus <= MOST_GPUS:
            yield f"{times * request.num_gpus} GPUs", replace(request, num_gpus=times * request.num_gpus)
    for gpu in sorted(gpus.values(), key=lambda each: each.memory_gib):
        if gpu.memory_gib > request.gpu.memory_gib:
            yield f"as many {gpu.name}", replace(request, gpu=gpu)
    length = request.sequence_length // 2
    while length >= 128:
        yield f"sequences of {length} tokens", replace(request, sequence_length=length)
        length //= 2
