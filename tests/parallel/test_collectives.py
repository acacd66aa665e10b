"""What one step sends, held against figures that follow from the layout alone."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

from models.layers.loss import CHUNK_TOKENS
from models.llama.config import LlamaConfig
from parallel import Buckets, CollectiveCounter, ParallelConfig, Sharding, build_mesh
from tests.parallel.small_model import CONFIG, GLOBAL_BATCH, SEQUENCE_LENGTH, batches, build, sgd
from tests.ranks import run_ranks

Figures = Counter[tuple[str, str, str, int]]
"""How often a (kind, view, phase, payload in bytes) occurs."""

FLOAT = 8  # the small model is float64
D, V, L = CONFIG.width, CONFIG.vocab_size, CONFIG.num_layers
EMBED = V * D * FLOAT
BLOCK = (CONFIG.num_matmul_parameters_per_block + 2 * D) * FLOAT
HEAD = V * D * FLOAT
NORM = D * FLOAT  # the last one, which the root holds
UNITS = [EMBED, *[BLOCK] * L, HEAD, NORM]
COUNT = 4 * 8  # valid tokens, refusals, micro-batches and their square, int64
LOSS = 8  # the summed loss, float64


def figures(items: list[tuple[str, str, str, int]]) -> Figures:
    return Counter(items)


def step_scalars(view: str) -> list[tuple[str, str, str, int]]:
    """Each step agrees on its token count before, and on its loss after."""
    return [("all_reduce", view, "forward", COUNT), ("all_reduce", view, "forward", LOSS)]


def full_shard(view: str) -> list[tuple[str, str, str, int]]:
    """Units are gathered in forward; backward needs blocks again; each gradient is reduce-scattered.

    Embedding and head compute their gradients without weights, and the root stays gathered.
    """
    return [
        *[("all_gather", view, "forward", unit) for unit in UNITS],
        *[("all_gather", view, "backward", BLOCK)] * L,
        *[("reduce_scatter", view, "backward", unit) for unit in UNITS],
    ]


def shard_grad_op(view: str) -> list[tuple[str, str, str, int]]:
    """A unit stays gathered from forward to backward, so it is gathered once."""
    return [each for each in full_shard(view) if each[:3] != ("all_gather", view, "backward")]


def tensor_parallel(split: bool, loss_parallel: bool) -> list[tuple[str, str, str, int]]:
    """What tp=2 sends for one micro-batch; `split` for sequence parallel."""
    hidden = GLOBAL_BATCH * SEQUENCE_LENGTH * D * FLOAT
    tokens = GLOBAL_BATCH * SEQUENCE_LENGTH
    gather, scatter = ("all_gather", "reduce_scatter") if split else (None, "all_reduce")
    forward: list[tuple[str | None, str, str, int]] = [
        # The embedding looks up its part of the vocabulary; the ranks' partial rows are added.
        (scatter, "tp", "forward", hidden),
        # Attention and feed-forward each need the whole sequence, and add up their outputs.
        *[(kind, "tp", "forward", hidden) for _ in range(2 * L) for kind in (gather, scatter)],
        (gather, "tp", "forward", hidden),  # the head too
    ]
    # Backward of a reduce-scatter is an all-gather and the reverse; without sequence parallel the forward's
    # all-reduce needs nothing in backward, and the free copies of the input need their gradients added.
    backward: list[tuple[str | None, str, str, int]] = [
        *[(kind, "tp", "backward", hidden) for _ in range(2 * L + 1) for kind in (gather, scatter)]
    ]
    chunk = CHUNK_TOKENS
    loss: list[tuple[str | None, str, str, int]] = []
    for start in range(0, tokens, chunk):
        size = min(chunk, tokens - start)
        if loss_parallel:  # the largest logit; then the sum of exponentials beside the target's logit
            loss += [("all_reduce", "tp", "forward", size * FLOAT), ("all_reduce", "tp", "forward", 2 * size * FLOAT)]
        else:
            loss += [("all_gather", "tp", "forward", size * V * FLOAT)]
    # Each rank saw its part of the sequence, so gradients of norms are added; else they are the same already.
    norms = [("all_reduce", "tp", "backward", D * FLOAT)] * (2 * L + 1) if split else []
    # Least and most of a hash of the micro-batches, int64: ranks that split matrices must be given the same ones.
    peers = [("all_reduce", "tp", "forward", 2 * 8)]
    return [each for each in [*forward, *backward, *loss, *norms, *peers] if each[0] is not None]  # type: ignore[misc]


def counted(config: ParallelConfig, num_micro_batches: int) -> Figures:
    """The collectives of one step on this rank."""
    trained = build(config)
    mine = batches(trained.mesh, 0, num_micro_batches)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(mine)
    return Counter((each.kind, each.view, each.phase, each.payload_bytes) for each in counter.records)


CASES: dict[str, tuple[int, dict[str, Any], int, list[tuple[str, str, str, int]]]] = {
    "full_shard": (2, {}, 1, [*full_shard("fsdp"), *step_scalars("fsdp")]),
    "shard_grad_op": (2, {"strategy": "shard_grad_op"}, 1, [*shard_grad_op("fsdp"), *step_scalars("fsdp")]),
    "hybrid_shard": (
        4,
        {"strategy": "hybrid_shard", "dp_replicate": 2},
        1,
        # Each rank's half of the gradient is added over the replicas.
        [
            *full_shard("fsdp"),
            *[("all_reduce", "dp_replicate", "backward", unit // 2) for unit in UNITS],
            *step_scalars("dp"),
        ],
    ),
    "resharding to pairs": (
        4,
        {"sharding": Sharding(reshard_group=2)},
        1,
        # After forward each pair of ranks keeps the whole between them, and gathers it again without the others.
        [
            *[("all_gather", "fsdp", "forward", unit) for unit in UNITS],
            *[("all_gather", "other", "backward", BLOCK)] * L,
            *[("reduce_scatter", "fsdp", "backward", unit) for unit in UNITS],
            *step_scalars("fsdp"),
        ],
    ),
    "the last unit kept": (
        2,
        {"sharding": Sharding(keep_last_unit=True)},
        1,
        # The last one that backward needs is a block.
        [*shard_grad_op("fsdp"), *[("all_gather", "fsdp", "backward", BLOCK)] * (L - 1), *step_scalars("fsdp")],
    ),
    "explicit prefetch gathers nothing twice": (
        2,
        {"sharding": Sharding(forward_prefetch=2, backward_prefetch=2)},
        1,
        [*full_shard("fsdp"), *step_scalars("fsdp")],
    ),
    "ddp": (
        2,
        {"data_parallel": "ddp", "buckets": Buckets(bucket_cap_mb=1000.0)},
        1,
        # DDP fills a first bucket of 1 MiB, which holds all of this model; smaller ones are in the next test.
        [("all_reduce", "dp_replicate", "backward", sum(UNITS)), *step_scalars("dp_replicate")],
    ),
    "no_shard": (
        2,
        {"strategy": "no_shard"},
        1,
        [*[("all_reduce", "dp_replicate", "backward", unit) for unit in UNITS], *step_scalars("dp_replicate")],
    ),
    "accumulation of three, reduced each": (2, {}, 3, [*full_shard("fsdp") * 3, *step_scalars("fsdp")]),
    "accumulation of three, reduced last": (
        2,
        {"reduce_gradients": "last"},
        3,
        # Parameters are gathered for each micro-batch, gradients are sent once.
        [
            *[each for each in full_shard("fsdp") * 3 if each[0] == "all_gather"],
            *[("reduce_scatter", "fsdp", "backward", unit) for unit in UNITS],
            *step_scalars("fsdp"),
        ],
    ),
    "tp with sequence and loss parallel": (2, {"tp": 2}, 1, tensor_parallel(True, True)),
    "tp with sequence parallel": (2, {"tp": 2, "loss_parallel": False}, 1, tensor_parallel(True, False)),
    "tp with loss parallel": (2, {"tp": 2, "sequence_parallel": False}, 1, tensor_parallel(False, True)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_what_its_layout_says(name: str) -> None:
    world_size, fields, num_micro_batches, expected = CASES[name]
    for figures_of_rank in run_ranks(world_size, counted, ParallelConfig(**fields), num_micro_batches):
        assert figures_of_rank == Counter(expected)


def test_buckets_of_any_size_send_each_gradient_once() -> None:
    for num_buckets, payload in run_ranks(2, small_buckets):
        assert num_buckets > 1
        assert payload == sum(UNITS)


def small_buckets() -> tuple[int, int]:
    trained = build(ParallelConfig(data_parallel="ddp", buckets=Buckets(bucket_cap_mb=0.1)))
    # DDP lays its buckets out anew after the first step.
    trained.forward_backward(batches(trained.mesh, 0))
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(batches(trained.mesh, 1, 3))
    buckets = [each for each in counter.records if each.phase == "backward"]
    return len(buckets), sum(each.payload_bytes for each in buckets)


@pytest.mark.parametrize("ranks", [2, 3])
def test_zero1_sends_gradients_and_then_the_updated_rows(ranks: int) -> None:
    # Every rank sends as many rows as the one with most, so rows that do not divide are padded.
    rows = [parameter for unit in ALL_ROWS for parameter in unit]
    padded = sum(-(-num_rows // ranks) * ranks * columns for num_rows, columns in rows) * FLOAT
    for summed, gathered in run_ranks(ranks, zero1_step):
        assert summed == sum(UNITS)
        assert gathered == padded


KV = CONFIG.num_kv_heads * CONFIG.shape.head_dim
F = CONFIG.feed_forward_width
BLOCK_ROWS = [(D, D), (KV, D), (KV, D), (D, D), (F, D), (F, D), (D, F), (D, 1), (D, 1)]
ALL_ROWS = [[(V, D)], *[BLOCK_ROWS] * L, [(D, 1), (V, D)]]


def zero1_step() -> tuple[int, int]:
    trained = build(ParallelConfig(data_parallel="zero1"))
    optimizer = trained.build_optimizer(sgd)
    mine = batches(trained.mesh, 0)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(mine)
        optimizer.step()
    in_backward = [each for each in counter.records if each.phase == "backward"]
    return sum(each.payload_bytes for each in in_backward), counter.payload_bytes()["all_gather", "dp_replicate"]


def test_bf16_gathers_and_float32_reductions_send_two_and_four_bytes_an_element() -> None:
    for gathered, reduced in run_ranks(2, mixed_precision_bytes):
        elements = sum(UNITS) // FLOAT
        assert gathered == (elements + L * BLOCK // FLOAT) * 2
        assert reduced == elements * 4


def mixed_precision_bytes() -> tuple[int, int]:
    from parallel import Precision

    trained = build(ParallelConfig(precision=Precision(compute="bfloat16", reduce="float32")), dtype=torch.float32)
    mine = batches(trained.mesh, 0)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(mine)
    total = counter.payload_bytes()
    return total["all_gather", "fsdp"], total["reduce_scatter", "fsdp"]


def test_every_kind_of_collective_is_counted_with_its_larger_side() -> None:
    for records in run_ranks(2, every_kind):
        assert records == [
            ("all_reduce", 24, "forward"),
            ("all_gather", 48, "forward"),
            ("all_gather", 48, "forward"),
            ("reduce_scatter", 48, "forward"),
            ("broadcast", 24, "forward"),
            ("all_to_all", 32, "forward"),
            ("all_reduce", 24, "backward"),
        ]


def every_kind() -> list[tuple[str, int, str]]:
    mesh = build_mesh(ParallelConfig())
    three, six, four = torch.ones(3, dtype=torch.float64), torch.ones(6, dtype=torch.float64), torch.ones(4).double()
    with CollectiveCounter(mesh) as counter:
        dist.all_reduce(three)
        dist.all_gather_into_tensor(six, three)
        dist.all_gather([torch.empty_like(three) for _ in range(2)], three)
        dist.reduce_scatter_tensor(three, six)
        dist.broadcast(three, 0)
        dist.all_to_all_single(torch.empty_like(four), four)
        dist.barrier()
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        leaf.register_hook(lambda gradient: dist.all_reduce(gradient.clone()))
        leaf.sum().backward()
    return [(each.kind, each.payload_bytes, each.phase) for each in counter.records]


def test_each_collective_has_an_end_and_waits_are_seen() -> None:
    for ends, order, waits_of in run_ranks(2, timed):
        assert ends == [True] * len(ends)
        assert order, "collectives end after they start, and a wait for one ends no earlier than it does"
        assert waits_of == [1, 1, 1, 1]


def timed() -> tuple[list[bool], bool, list[int]]:
    mesh = build_mesh(ParallelConfig())
    own = dist.Work.wait
    one, two = torch.ones(3), torch.ones(6)
    waits: list[int] = []
    with CollectiveCounter(mesh) as counter:
        for call in (
            lambda: dist.all_reduce(one),
            lambda: dist.all_gather_single(two, one, async_op=True).wait(),
            # Of this one gloo tells the end only to who waits.
            lambda: dist.reduce_scatter_single(one, two),
            # What it gives waits when it is used.
            lambda: all_reduce(one, "sum", mesh.group("fsdp")) + 1,
        ):
            before = len(counter.waits)
            call()
            waits.append(len(counter.waits) - before)
    assert dist.Work.wait is own
    ends = [each.end_s is not None for each in counter.records]
    pairs = zip(counter.records, counter.waits, strict=True)
    ordered = all(each.start_s < (each.end_s or 0) <= wait.end_s + 1e-3 for each, wait in pairs)
    return ends, ordered, waits


def test_an_unknown_collective_is_an_error_and_not_left_out() -> None:
    assert "add it to its table" in run_ranks(2, unknown_collective)[0]


def unknown_collective() -> str:
    from parallel.collective_ops import OPS

    mesh = build_mesh(ParallelConfig())
    kept = OPS.pop("c10d::allreduce_")
    try:
        with CollectiveCounter(mesh):
            dist.all_reduce(torch.ones(1))
    except NotImplementedError as error:
        return str(error)
    finally:
        OPS["c10d::allreduce_"] = kept
    return "no error"


def test_the_small_model_is_the_one_the_figures_are_about() -> None:
    assert sum(UNITS) == LlamaConfig(num_layers=2).num_parameters * FLOAT
