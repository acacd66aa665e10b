"""Holds figures that tutorials of the field print against the planner: each with what would have to be true of it."""

from collections.abc import Iterator
from dataclasses import replace

from parallel.config import DataParallel, ParallelConfig, Sharding
from parallel.planner.candidate import Candidate, Request
from parallel.planner.claim import GPU, HALF, RATIOS, SHARES, Claim, Shapes
from parallel.planner.claims_of_memory import of_fits, of_stages, of_states
from parallel.planner.claims_of_scaling import TRAFFIC_SHARES, communication_share, needed_bandwidth, speedups
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import KEEP_ALL, KEEP_INPUT, ModelCosts, Recompute, model_costs
from parallel.planner.hardware import Gpu, find_gpu
from parallel.planner.memory import predict_memory
from parallel.planner.ranking import Plan, evaluate
from parallel.precision import Precision
from parallel.traits import TRAITS


def claims(shape_of: Shapes) -> tuple[Claim, ...]:
    """All claims.

    Args:
        shape_of: Gives llama2-7b, llama2-13b, llama3.1-70b and gpt-175b.
    """
    return (
        *of_states(),
        *_scaling(shape_of),
        _shares(shape_of),
        of_more_gpus(shape_of),
        of_stages(),
        *of_fits(shape_of),
        _recomputation(shape_of),
        of_bfloat16(shape_of),
        _headroom(shape_of),
    )


def _scaling(shape_of: Shapes) -> Iterator[Claim]:
    ranks = (8, 32, 64, 256)
    printed: dict[DataParallel, tuple[float, ...]] = {
        "ddp": (7.6, 28.0, 50.0, 150.0),
        "fsdp2": (7.0, 25.0, 45.0, 140.0),
    }
    for backend, said in printed.items():
        found = speedups(shape_of("llama2-7b"), find_gpu(GPU), backend, ranks)
        needed = [
            needed_bandwidth(shape_of("llama2-7b"), find_gpu(GPU), backend, each, target)
            for each, target in zip(ranks, said, strict=True)
        ]
        links = ", ".join("none" if each is None else f"{each:.0f}" for each in needed)
        shards = TRAITS[backend].shards
        name = "FSDP" if shards else "DDP"
        yield Claim(
            f"{name} of 7B speeds up {'x/'.join(f'{each:g}' for each in said)}x on 8/32/64/256 GPUs",
            f"{'x/'.join(f'{each:.1f}' for each in found)}x on {GPU} with 4,096 tokens a GPU"
            + (", as each updates its part of the states alone" if shards else ", as latency of rings grows"),
            all(abs(ours / theirs - 1) < RATIOS for ours, theirs in zip(found, said, strict=True)),
            f"links carried {links} GB/s of each GPU at 8/32/64/256, which is no single machine"
            + ("" if shards else "; and 7B in DDP needs 112 GB of states, more than such a GPU has"),
        )


def _shares(shape_of: Shapes) -> Claim:
    said = "; ".join(f"{name}@{ranks} {share:.0%}" for name, ranks, share in TRAFFIC_SHARES)
    found = [communication_share(shape_of, name, ranks, find_gpu("h100-80gb")) for name, ranks, _ in TRAFFIC_SHARES]
    exposed = "; ".join(f"{each.exposed:.0%}" for each in found)
    sent = "; ".join(f"{each.sent:.0%}" for each in found)
    same = [abs(each.exposed - share) < SHARES for each, (_, _, share) in zip(found, TRAFFIC_SHARES, strict=True)]
    return Claim(
        f"share of time in communication: {said}",
        f"waited for: {exposed}; under way, mostly behind computation: {sent} (h100-80gb, full_shard, 8,192 tokens)",
        all(same),
        "nothing overlaps, and batches are small: the share falls with tokens a GPU, not with the model's size",
    )


def of_more_gpus(shape_of: Shapes, few: int = 8, many: int = 256) -> Claim:
    """What share of a step of the same tokens is communication.

    Args:
        shape_of: Gives llama2-7b.
        few: Some GPUs.
        many: More of them.
    """
    before, after = (
        communication_share(shape_of, "7B", ranks, find_gpu("h100-80gb"), 2**21).exposed for ranks in (few, many)
    )
    return Claim(
        "more GPUs cure traffic",
        f"7B with 2.1 M tokens a step waits {before:.0%} of its time on {few} GPUs and {after:.0%} on {many}: "
        "each sends 3P(N-1)/N elements whatever N, beside less computation",
        after < before,
        "the global batch grows with the GPUs, and even then traffic does not fall",
    )


def _recomputation(shape_of: Shapes) -> Claim:
    kept, again = (_of_7b(shape_of, each) for each in (KEEP_ALL, KEEP_INPUT))
    of_activations = 1 - again.memory.activations / kept.memory.activations
    saved, slower = 1 - again.memory.reserved / kept.memory.reserved, again.time.step_s / kept.time.step_s - 1
    return Claim(
        "activation checkpointing saves 30 % of memory",
        f"{of_activations:.0%} of activations and {saved:.0%} of the peak of 7B on 8 {GPU} with 2 x 4,096 tokens, for "
        f"{slower:.0%} more time",
        abs(saved - 0.3) < SHARES,
        f"activations are {0.3 / of_activations:.0%} of the peak; what 30 % is near to is its cost in time",
    )


def of_bfloat16(shape_of: Shapes, gpu: Gpu | None = None) -> Claim:
    """What computing in bfloat16 gives.

    Args:
        shape_of: Gives llama2-7b.
        gpu: What runs it. None: the GPU of these tutorials.
    """
    half, full = (
        _of_7b(shape_of, KEEP_ALL, each, gpu) for each in (Precision(compute="bfloat16", reduce="float32"), Precision())
    )
    memory, speed = 1 - half.memory.reserved / full.memory.reserved, full.time.step_s / half.time.step_s
    return Claim(
        "bf16 halves memory and doubles speed",
        f"7B on 8 {GPU}: {memory:.0%} less memory, {speed:.1f} times as fast: states stay float32, activations halve",
        abs(memory - 0.5) < HALF and abs(speed / 2 - 1) < RATIOS,
        "everything is bfloat16, optimizer included, and float32 runs at half of bfloat16's peak, as TF32 does, not at "
        "1/16",
    )


def _headroom(shape_of: Shapes) -> Claim:
    plan = _of_7b(shape_of, KEEP_INPUT)
    states = plan.memory.parameters + plan.memory.gradients + plan.memory.optimizer_state
    allocated, of_states = plan.memory.reserved / plan.memory.allocated, plan.memory.reserved / max(1.0, states)
    return Claim(
        "leave headroom of 1.2 to 1.5 on the estimate",
        f"{allocated:.2f} on the whole peak, for what the allocator reserves; on model states alone 7B on 8 GPUs needs "
        f"{of_states:.1f} times as much",
        1.2 <= allocated <= 1.5,
        "the estimate counts activations, logits and units in flight, not states alone",
    )


def _of_7b(shape_of: Shapes, recompute: Recompute, precision: Precision | None = None, gpu: Gpu | None = None) -> Plan:
    precision = precision or Precision(compute="bfloat16", reduce="float32")
    config = ParallelConfig(dp_shard=8, precision=precision, sharding=Sharding(), compile=True)
    shape = shape_of("llama2-7b")
    request = Request(shape=shape, gpu=gpu or find_gpu(GPU), num_gpus=8, sequence_length=4096, global_batch=16)
    costs: ModelCosts = model_costs(shape)
    candidate = Candidate(config, recompute, "every_micro_batch", 2, 1)
    memory = predict_memory(costs, candidate, 4096, CONSTANTS)
    return evaluate(replace(request, reduces=("float32",)), costs, candidate, CONSTANTS, memory)
