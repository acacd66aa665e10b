"""What a rank holds equals formulas to the byte: at rest, at the end of forward, at the end of backward."""

from math import ceil
from typing import Any, NamedTuple

import pytest
import torch

from models.llama.config import LlamaConfig
from parallel import ParallelConfig, Precision, Sharding
from parallel.ledger.live import LiveBytes, LiveMeter, all_live_bytes, storage_bytes
from tests.parallel.small_model import adamw, batches, build, bytes_at_rest
from tests.ranks import run_ranks

Parameters = list[tuple[int, int, int | None]]
MODEL = LlamaConfig(num_layers=2)
D, F, V, L = MODEL.width, MODEL.feed_forward_width, MODEL.vocab_size, MODEL.num_layers
KV = MODEL.num_kv_heads * MODEL.shape.head_dim
FLOAT, BFLOAT = 4, 2
# Of each parameter: rows, columns, and along which dim tensor parallelism splits it (None: not at all).
BLOCK = [(D, D, 0), (KV, D, 0), (KV, D, 0), (D, D, 1), (F, D, 0), (F, D, 0), (D, F, 1), (D, 1, None), (D, 1, None)]
ALL = [(V, D, 0), *BLOCK * L, (D, 1, None), (V, D, 0)]
TIED = ALL[:-1]
# What is gathered at the end of forward: the root; the units whose backward needs weights.
NORM: Parameters = [(D, 1, None)]
NEEDED = [*BLOCK * L, *NORM]


def shard_elements(parameters: Parameters, ranks: int, tp: int = 1) -> int:
    """Elements on rank 0: tensor parallelism splits first, then fully_shard splits what is left by rows."""
    total = 0
    for rows, columns, split in parameters:
        rows, columns = (ceil(rows / tp) if split == 0 else rows), (ceil(columns / tp) if split == 1 else columns)
        total += ceil(rows / ranks) * columns
    return total


class Moments(NamedTuple):
    """Three moments of a step."""

    rest: LiveBytes
    after_forward: LiveBytes
    after_backward: LiveBytes
    gradients_in_all: int


def measure(fields: dict[str, Any], tied: bool) -> Moments:
    """A step of a model whose optimizer has state already."""
    trained = build(ParallelConfig(**fields), LlamaConfig(num_layers=L, tied_embeddings=tied), dtype=torch.float32)
    optimizer = trained.build_optimizer(adamw)
    mine = batches(trained.mesh, 0)
    trained.forward_backward(mine)
    optimizer.step()
    optimizer.zero_grad()
    meter = LiveMeter(trained, optimizer)
    moments = [meter.measure()]
    before = bytes_at_rest(trained.mesh.device)
    trained.model.register_forward_hook(lambda *_: moments.append(meter.measure()))
    trained.forward_backward(mine)
    moments.append(meter.measure())
    rest, after_forward, after_backward = moments
    return Moments(rest, after_forward, after_backward, bytes_at_rest(trained.mesh.device) - before)


# Layout, tied embeddings; ranks that share a copy, tp; elements gathered at the end of forward, bytes of each.
CASES: dict[str, tuple[int, dict[str, Any], bool, int, int, Parameters, int]] = {
    "full_shard frees every unit and keeps the last norm, which is in the root": (2, {}, False, 2, 1, NORM, FLOAT),
    "full_shard keeps the tied embedding, which is in the root": (2, {}, True, 2, 1, [(V, D, 0), (D, 1, None)], FLOAT),
    "uneven shards count their largest": (3, {}, False, 3, 1, [(3 * ceil(D / 3), 1, None)], FLOAT),
    "shard_grad_op keeps what backward needs": (2, {"strategy": "shard_grad_op"}, False, 2, 1, NEEDED, FLOAT),
    "in bf16 what is gathered is half as large": (
        2,
        {"strategy": "shard_grad_op", "precision": Precision(compute="bfloat16", reduce="float32")},
        False,
        2,
        1,
        NEEDED,
        BFLOAT,
    ),
    "hybrid_shard shares within a group": (
        4,
        {"strategy": "hybrid_shard", "dp_replicate": 2},
        False,
        2,
        1,
        NORM,
        FLOAT,
    ),
    "hybrid_shard_zero2 keeps what backward needs": (
        4,
        {"strategy": "hybrid_shard_zero2", "dp_replicate": 2},
        False,
        2,
        1,
        NEEDED,
        FLOAT,
    ),
    "tp splits all but the norms": (2, {"tp": 2}, False, 1, 2, NORM, FLOAT),
    "the last block can be kept": (
        2,
        {"sharding": Sharding(keep_last_unit=True)},
        False,
        2,
        1,
        [*BLOCK, *NORM],
        FLOAT,
    ),
    "one unit of the whole model is kept": (2, {"sharding": Sharding(units="model")}, False, 2, 1, ALL, FLOAT),
}


@pytest.mark.parametrize(("backend", "share"), [("ddp", 1), ("zero1", 3)])
def test_ddp_holds_everything_and_zero1_its_rows_of_the_optimizer_state(backend: str, share: int) -> None:
    whole = shard_elements(ALL, 1) * FLOAT
    moments: Moments = run_ranks(3, measure, {"data_parallel": backend}, False)[0]
    state = 2 * shard_elements(ALL, share) * FLOAT + FLOAT * len(ALL)
    assert moments.rest == LiveBytes(parameters=whole, unsharded=0, gradients=0, optimizer_state=state)
    assert moments.after_backward == LiveBytes(parameters=whole, unsharded=0, gradients=whole, optimizer_state=state)


@pytest.mark.parametrize("name", CASES)
def test_live_memory_equals_its_formula(name: str) -> None:
    world_size, fields, tied, ranks, tp, gathered, itemsize = CASES[name]
    moments: Moments = run_ranks(world_size, measure, fields, tied)[0]
    parameters = TIED if tied else ALL
    shards = shard_elements(parameters, ranks, tp) * FLOAT
    # AdamW: two moments, and the number of steps of each parameter.
    adam = 2 * shards + FLOAT * len(parameters)
    rest = LiveBytes(parameters=shards, unsharded=0, gradients=0, optimizer_state=adam)
    whole = shard_elements(gathered, 1, tp) * itemsize
    assert moments.rest == rest
    assert moments.after_forward == LiveBytes(parameters=shards, unsharded=whole, gradients=0, optimizer_state=adam)
    assert moments.after_backward == LiveBytes(parameters=shards, unsharded=0, gradients=shards, optimizer_state=adam)
    assert moments.gradients_in_all == shards, "something else is left over after a step"


@pytest.mark.parametrize(("reduce", "share"), [("every_micro_batch", 2), ("last", 1)])
def test_reducing_last_holds_whole_gradients_between_micro_batches(reduce: str, share: int) -> None:
    expected = shard_elements(ALL, share) * FLOAT
    assert run_ranks(2, held_between_micro_batches, reduce) == [expected] * 2


def held_between_micro_batches(reduce: Any) -> int:
    """Bytes that appear from the start of the first micro-batch to the start of the second."""
    trained = build(ParallelConfig(reduce_gradients=reduce), MODEL, dtype=torch.float32)
    two = batches(trained.mesh, 0, 2)
    trained.forward_backward(two)
    held: list[int] = []
    trained.model.register_forward_pre_hook(lambda *_: held.append(all_live_bytes(trained.mesh.device)))
    trained.forward_backward(two)
    # Each pre-hook sees the tokens of its own micro-batch; the loss of the first one is a scalar.
    return held[1] - held[0] - FLOAT


def test_memory_that_tensors_share_counts_once() -> None:
    tensor = torch.zeros(10)
    assert storage_bytes([tensor, tensor[2:], tensor.view(2, 5)]) == 40
    assert storage_bytes([]) == 0
