"""Holds figures that tutorials of the field print against the planner: each with what would have to be true of it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from parallel.config import DataParallel, ParallelConfig, Sharding
from parallel.plan import ModelShape
from parallel.planner.accounting import state_bytes
from parallel.planner.candidate import Candidate, Request
from parallel.planner.claims_of_scaling import TRAFFIC_SHARES, communication_share, needed_bandwidth, speedups
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import KEEP_ALL, KEEP_INPUT, ModelCosts, Recompute, model_costs
from parallel.planner.hardware import find_gpu
from parallel.planner.memory import predict_memory
from parallel.planner.ranking import Plan, evaluate
from parallel.planner.search import search
from parallel.precision import Precision
from parallel.traits import TRAITS

GB = 1e9
GPU = "a100-80gb"
"""The GPU that most of these tutorials have in mind."""

Shapes = Callable[[str], ModelShape]
"""Gives the shape of a model by its name."""


class Claim(NamedTuple):
    """A figure of tutorials.

    Attributes:
        claim: What they say.
        figure: What the planner says.
        holds: Whether that is the same.
        assumption: Under which the claim is true.
    """

    claim: str
    figure: str
    holds: bool
    assumption: str


def claims(shape_of: Shapes) -> tuple[Claim, ...]:
    """All claims.

    Args:
        shape_of: Gives llama2-7b, llama2-13b, llama3.1-70b and gpt-175b.
    """
    return (
        *_states(),
        *_scaling(shape_of),
        *_traffic(shape_of),
        *_stages(),
        *_fits(shape_of),
        *_recomputation(shape_of),
        *_headroom(shape_of),
    )


def as_markdown(found: tuple[Claim, ...]) -> str:
    """The claims as a table.

    Args:
        found: What `claims` gave.
    """
    head = "| tutorials say | the planner says | holds | it would be true if |\n|---|---|---|---|\n"
    return head + "".join(
        f"| {each.claim} | {each.figure} | {'yes' if each.holds else 'no'} | {each.assumption} |\n" for each in found
    )


def _states() -> Iterator[Claim]:
    ranks = (1, 8, 32, 64)
    full = [state_bytes("classic", "full_shard", 7e9, each) / GB for each in ranks]
    half = [7e9 * 8 / each / GB for each in ranks]
    yield Claim(
        "7B at 1/8/32/64 ranks holds 112/14/3.5/1.75 GB of states a GPU",
        f"{_listed(full)} GB: 16 bytes a parameter over N under full_shard",
        [round(each, 2) for each in full] == [112.0, 14.0, 3.5, 1.75],
        "parameters, gradients, float32 copy and both moments are counted: 2+2+4+4+4 in float16 training, or 4+4+8 as "
        "stored here",
    )
    yield Claim(
        "7B at 1/8/32/64 ranks holds 56/7/1.75/0.88 GB of states a GPU",
        f"{_listed(half)} GB is 8 bytes a parameter over N; AdamW's states are {_listed(full)} GB",
        False,
        "8 bytes a parameter: AdamW's moments alone (4+4), or pure bfloat16 training without a float32 copy (2+2+2+2)",
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
            all(abs(ours / theirs - 1) < 0.1 for ours, theirs in zip(found, said, strict=True)),
            f"links carried {links} GB/s of each GPU at 8/32/64/256, which is no single machine"
            + ("" if shards else "; and 7B in DDP needs 112 GB of states, more than such a GPU has"),
        )


def _traffic(shape_of: Shapes) -> Iterator[Claim]:
    said = "; ".join(f"{name}@{ranks} {share:.0%}" for name, ranks, share in TRAFFIC_SHARES)
    found = [communication_share(shape_of, name, ranks, find_gpu("h100-80gb")) for name, ranks, _ in TRAFFIC_SHARES]
    exposed = "; ".join(f"{each.exposed:.0%}" for each in found)
    sent = "; ".join(f"{each.sent:.0%}" for each in found)
    same = [abs(each.exposed - share) < 0.05 for each, (_, _, share) in zip(found, TRAFFIC_SHARES, strict=True)]
    yield Claim(
        f"share of time in communication: {said}",
        f"waited for: {exposed}; under way, mostly behind computation: {sent} (h100-80gb, full_shard, 8,192 tokens)",
        all(same),
        "nothing overlaps, and batches are small: the share falls with tokens a GPU, not with the model's size",
    )
    few, many = (communication_share(shape_of, "7B", ranks, find_gpu("h100-80gb"), 2**21) for ranks in (8, 256))
    yield Claim(
        "more GPUs cure traffic",
        f"7B with 2.1 M tokens a step waits {few.exposed:.0%} of its time on 8 GPUs and {many.exposed:.0%} on 256: "
        "each sends 3P(N-1)/N elements whatever N, beside less computation",
        False,
        "the global batch grows with the GPUs, and even then traffic does not fall",
    )


def _stages() -> Iterator[Claim]:
    names = ("zero1", "shard_grad_op", "full_shard")
    saved = {each: [1 - state_bytes("classic", each, 1, ranks) / 16 for ranks in (2, 8, 64)] for each in names}
    words = {"zero1": "ZeRO-1", "shard_grad_op": "ZeRO-2", "full_shard": "ZeRO-3"}
    figures = "; ".join(f"{words[each]} {' / '.join(f'{part:.0%}' for part in saved[each])}" for each in names)
    yield Claim(
        "ZeRO's stages save 50 % and 66 % of memory",
        f"of states on 2 / 8 / 64 ranks: {figures}",
        False,
        "50 % is ZeRO-3 on 2 ranks (ZeRO-2 on 2.3, ZeRO-1 on 3), 66 % ZeRO-3 on 3 or ZeRO-1 on 8; shares depend on N, "
        "and activations are not shared at all",
    )


def _fits(shape_of: Shapes) -> Iterator[Claim]:
    for name, said, ranks, shape in (("70B", 70e9, 8, "llama3.1-70b"), ("175B", 175e9, 32, "gpt-175b")):
        held = state_bytes("classic", "full_shard", said, ranks) / GB
        fewest, offloaded = (_fewest(shape_of(shape), offloads) for offloads in (False, True))
        yield Claim(
            f"{name} trains on {ranks} x 80 GB",
            f"16P/N is {held:g} GB a GPU; the fewest {GPU} that hold it are {fewest}"
            + (f", or {offloaded} with states in host memory" if offloaded != fewest else ""),
            False,
            "optimizer states are in host memory, or adapters are trained, or the bfloat16 weights alone are counted "
            f"({2 * said / ranks / GB:.1f} GB a GPU)",
        )


def _fewest(shape: ModelShape, offloads: bool) -> int:
    """The fewest GPUs, in whole nodes, that a model fits."""
    nodes = 1
    while True:
        request = Request(
            shape=shape, gpu=find_gpu(GPU), num_gpus=8 * nodes, sequence_length=2048, global_batch=8 * nodes
        )
        if search(request, most=1, allows=lambda _, kind: offloads or not kind.offloads).plans:
            return 8 * nodes
        nodes += 1


def _recomputation(shape_of: Shapes) -> Iterator[Claim]:
    kept, again = (_of_7b(shape_of, each) for each in (KEEP_ALL, KEEP_INPUT))
    of_activations = 1 - again.memory.activations / kept.memory.activations
    saved, slower = 1 - again.memory.reserved / kept.memory.reserved, again.time.step_s / kept.time.step_s - 1
    yield Claim(
        "activation checkpointing saves 30 % of memory",
        f"{of_activations:.0%} of activations and {saved:.0%} of the peak of 7B on 8 {GPU} with 2 x 4,096 tokens, for "
        f"{slower:.0%} more time",
        abs(saved - 0.3) < 0.05,
        f"activations are {0.3 / of_activations:.0%} of the peak; what 30 % is near to is its cost in time",
    )
    full = _of_7b(shape_of, KEEP_ALL, Precision())
    memory, speed = 1 - kept.memory.reserved / full.memory.reserved, full.time.step_s / kept.time.step_s
    yield Claim(
        "bf16 halves memory and doubles speed",
        f"7B on 8 {GPU}: {memory:.0%} less memory, {speed:.1f} times as fast: states stay float32, activations halve",
        False,
        "everything is bfloat16, optimizer included, and float32 runs at half of bfloat16's peak, as TF32 does, not at "
        "1/16",
    )


def _headroom(shape_of: Shapes) -> Iterator[Claim]:
    plan = _of_7b(shape_of, KEEP_INPUT)
    states = plan.memory.parameters + plan.memory.gradients + plan.memory.optimizer_state
    allocated, of_states = plan.memory.reserved / plan.memory.allocated, plan.memory.reserved / max(1.0, states)
    yield Claim(
        "leave headroom of 1.2 to 1.5 on the estimate",
        f"{allocated:.2f} on the whole peak, for what the allocator reserves; on model states alone 7B on 8 GPUs needs "
        f"{of_states:.1f} times as much",
        1.2 <= allocated <= 1.5,
        "the estimate counts activations, logits and units in flight, not states alone",
    )


def _of_7b(shape_of: Shapes, recompute: Recompute, precision: Precision | None = None) -> Plan:
    precision = precision or Precision(compute="bfloat16", reduce="float32")
    config = ParallelConfig(dp_shard=8, precision=precision, sharding=Sharding(), compile=True)
    shape = shape_of("llama2-7b")
    request = Request(shape=shape, gpu=find_gpu(GPU), num_gpus=8, sequence_length=4096, global_batch=16)
    costs: ModelCosts = model_costs(shape)
    candidate = Candidate(config, recompute, "every_micro_batch", 2, 1)
    memory = predict_memory(costs, candidate, 4096, CONSTANTS)
    return evaluate(replace(request, reduces=("float32",)), costs, candidate, CONSTANTS, memory)


def _listed(values: list[float]) -> str:
    return "/".join(f"{each:.3g}" for each in values)
