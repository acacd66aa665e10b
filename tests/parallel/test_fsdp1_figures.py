"""What FSDP1 sends and holds in a step, held against figures that follow from the layout alone."""

from collections import Counter
from typing import Any

import pytest
import torch

from models.llama.config import LlamaConfig
from parallel import CollectiveCounter, ParallelConfig, Precision, Sharding
from parallel.ledger.live import LiveBytes, LiveMeter
from tests.parallel.small_model import adamw, batches, build, bytes_at_rest
from tests.parallel.test_fsdp1 import HYBRID, HYBRID_ZERO2, MODEL, ODD, fsdp1
from tests.ranks import run_ranks

# FSDP1 aligns each parameter to 16 bytes, and fills a unit up to a multiple of ranks.
ALIGNMENT_BYTES = 16


def parameters_of_units(model: LlamaConfig) -> list[list[int]]:
    """Elements of each parameter: embedding, blocks, head, and the root with the final norm."""
    width, kv, wide = model.width, model.num_kv_heads * model.shape.head_dim, model.feed_forward_width
    attention = [width * width, kv * width, kv * width, width * width]
    block = [width, *attention, width, *[wide * width] * 3]
    embedding = [model.vocab_size * width]
    return [embedding, *[block] * model.num_layers, embedding, [width]]


def flat_elements(parameters: list[int], ranks: int, itemsize: int) -> int:
    """Elements of a unit with what fills it up."""
    total, aligned = 0, ALIGNMENT_BYTES // itemsize
    for elements in parameters:
        total += -total % aligned + elements
    return total + -total % ranks


SENT: dict[str, tuple[int, dict[str, Any], LlamaConfig, int]] = {
    "full_shard": (2, {}, MODEL, 1),
    "full_shard with padding": (3, {}, ODD, 1),
    "full_shard, accumulating": (2, {}, MODEL, 3),
    "full_shard, reduced last": (2, {"reduce_gradients": "last"}, MODEL, 3),
    "full_shard, last unit kept": (2, {"sharding": Sharding(keep_last_unit=True)}, MODEL, 1),
    "full_shard, prefetch": (2, {"sharding": Sharding(forward_prefetch=1, backward_prefetch=1)}, MODEL, 1),
    "shard_grad_op": (2, {"strategy": "shard_grad_op"}, ODD, 1),
    "no_shard": (2, {"strategy": "no_shard"}, ODD, 2),
    "hybrid_shard": (4, HYBRID, ODD, 1),
    "hybrid_shard_zero2": (4, HYBRID_ZERO2, MODEL, 2),
}


@pytest.mark.parametrize("name", SENT)
def test_a_step_sends_what_its_strategy_says(name: str) -> None:
    world_size, fields, model, num_micro_batches = SENT[name]
    config = fsdp1(fields)
    expected = expected_collectives(config, model, num_micro_batches, world_size)
    for found in run_ranks(world_size, counted, config, model, num_micro_batches):
        assert found == expected


def expected_collectives(config: ParallelConfig, model: LlamaConfig, times: int, world_size: int) -> Counter[Any]:
    strategy, hybrid = config.resolved_strategy, config.is_hybrid
    ranks = 1 if strategy == "no_shard" else world_size // config.dp_replicate
    # float64
    units = [flat_elements(each, ranks, 8) * 8 for each in parameters_of_units(model)]
    *inner, _root = units
    data = "fsdp" if ranks == world_size else ("dp" if hybrid else "dp_replicate")
    sent: Counter[Any] = Counter()
    # The root is gathered first and kept for its backward.
    again = inner if strategy in ("full_shard", "hybrid_shard") else []
    if config.sharding.keep_last_unit:
        again = [inner[0], *inner[2:]]  # blocks are alike
    reductions = 1 if config.reduce_gradients == "last" or strategy == "no_shard" else times
    if strategy == "no_shard":
        for unit in units:
            sent["all_reduce", data, "backward", unit] += reductions
    else:
        for unit in units:
            sent["all_gather", "fsdp", "forward", unit] += times
            sent["reduce_scatter", "fsdp", "backward", unit] += reductions
        for unit in again:
            sent["all_gather", "fsdp", "backward", unit] += times
        for unit in units if hybrid else ():
            sent["all_reduce", "dp_replicate", "backward", unit // ranks] += reductions
    # Valid tokens, refusals, micro-batches and their square; the summed loss.
    sent["all_reduce", data, "forward", 4 * 8] += 1
    sent["all_reduce", data, "forward", 8] += 1
    return sent


def counted(config: ParallelConfig, model: LlamaConfig, num_micro_batches: int) -> Counter[Any]:
    trained = build(config, model)
    mine = batches(trained.mesh, 0, num_micro_batches)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(mine)
    return Counter((each.kind, each.view, each.phase, each.payload_bytes) for each in counter.records)


HELD: dict[str, tuple[int, dict[str, Any], LlamaConfig, bool, int]] = {
    "full_shard keeps the root alone": (2, {}, MODEL, False, 4),
    "full_shard with padding": (3, {}, ODD, False, 4),
    "shard_grad_op keeps everything": (3, {"strategy": "shard_grad_op"}, ODD, True, 4),
    "in bf16 what is gathered is half as large": (
        2,
        {"strategy": "shard_grad_op", "precision": Precision(compute="bfloat16", reduce="float32")},
        MODEL,
        True,
        2,
    ),
    "hybrid_shard shares within a group": (4, HYBRID, MODEL, False, 4),
    "hybrid_shard_zero2 keeps everything": (4, HYBRID_ZERO2, ODD, True, 4),
}


@pytest.mark.parametrize("name", HELD)
def test_live_memory_equals_its_formula(name: str) -> None:
    world_size, fields, model, keeps_all, itemsize = HELD[name]
    units = parameters_of_units(model)
    ranks = world_size // fields.get("dp_replicate", 1)
    # Padding is that of the dtype in which units are gathered.
    flat = [flat_elements(each, ranks, itemsize) for each in units]
    shards = sum(flat) // ranks * 4
    gathered = sum(flat if keeps_all else flat[-1:]) * itemsize
    num_parameters = sum(map(len, units))
    own_elements = 0
    for rest, after_forward, after_backward, gradients, elements in run_ranks(
        world_size, measured, fsdp1(fields), model
    ):
        # AdamW keeps two moments of what a rank holds without padding, and a count of steps of every parameter.
        state = 2 * 4 * elements + 4 * num_parameters
        assert rest == LiveBytes(parameters=shards, unsharded=0, gradients=0, optimizer_state=state)
        assert after_forward == LiveBytes(parameters=shards, unsharded=gathered, gradients=0, optimizer_state=state)
        assert after_backward == LiveBytes(parameters=shards, unsharded=0, gradients=shards, optimizer_state=state)
        assert gradients == shards, "something else is left over after a step"
        own_elements += elements
    assert own_elements == sum(map(sum, units)) * fields.get("dp_replicate", 1)


def measured(config: ParallelConfig, model: LlamaConfig) -> tuple[LiveBytes, LiveBytes, LiveBytes, int, int]:
    trained = build(config, model, dtype=torch.float32)
    optimizer = trained.build_optimizer(adamw)
    mine = batches(trained.mesh, 0)
    trained.forward_backward(mine)
    optimizer.step()
    optimizer.zero_grad()
    trained.evaluate(mine)
    meter = LiveMeter(trained, optimizer)
    moments = [meter.measure()]
    before = bytes_at_rest(trained.mesh.device)
    trained.model.register_forward_hook(lambda *_: moments.append(meter.measure()))
    trained.forward_backward(mine)
    moments.append(meter.measure())
    rest, after_forward, after_backward = moments
    elements = sum(parameter.numel() for parameter in trained.named_parameters().values())
    return rest, after_forward, after_backward, bytes_at_rest(trained.mesh.device) - before, elements
