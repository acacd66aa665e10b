"""Sequences that ranks share: logits, losses, what a step sends, checkpoints, and what is refused."""

import gc
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import TrainState, load, save
from models.layers.kv_cache import kv_cache
from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.plan import llama_plan
from parallel import Batch, CollectiveCounter, ParallelConfig, build_mesh, parallelize
from parallel.layout import check_layout, check_sequence_length
from parallel.ledger.trace import MemoryMeter
from tests.models.moe import small_moe
from tests.parallel.layout_rows import DENSE
from tests.parallel.small_model import (
    CONFIG,
    GLOBAL_BATCH,
    SEQUENCE_LENGTH,
    adamw,
    batches,
    build,
    difference,
    sgd,
    whole,
    whole_parameters,
)
from tests.ranks import run_ranks

METHODS = ("allgather", "ring", "ulysses")
ONE: dict[str, Any] = {"data_parallel": "none"}


def cp(method: str, **fields: Any) -> dict[str, Any]:
    return {"cp": 2, "cp_method": method} | fields


def without_documents(config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of a batch whose rows are one document each, for which no core makes a mask."""
    trained = build(ParallelConfig(**config))
    mine = [Batch.from_tokens(each.tokens, each.labels) for each in batches(trained.mesh, 0, 2)]
    evaluated, result = trained.evaluate(mine), trained.forward_backward(mine)
    gradients = {fqn: whole(each.grad) for fqn, each in trained.named_parameters().items() if each.grad is not None}
    return [evaluated.loss, result.loss, result.num_valid_tokens], gradients


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_one_document_give_the_gradients_of_one_process_and_each_token_counts_once(method: str) -> None:
    (losses, gradients) = run_ranks(1, without_documents, ONE)[0]
    for found, each in run_ranks(2, without_documents, cp(method)):
        assert found[2] == losses[2]
        assert difference(found, losses) < 1e-15
        assert max(difference(each[fqn], gradients[fqn]) for fqn in gradients) < 1e-13


def logits(config: dict[str, Any], length: int) -> Tensor:
    """Logits of rows of two documents."""
    trained = build(ParallelConfig(**config))
    batch = batches(build_mesh(ParallelConfig(**ONE)) if config == ONE else trained.mesh, 0)[0]
    assert batch.document_ids is not None
    inputs = (batch.tokens, batch.positions, batch.document_ids)
    tokens, positions, document_ids = (each[:4, :length] for each in inputs)
    packed = trained.logits(tokens, positions=positions, document_ids=document_ids)
    return torch.stack([packed, trained.logits(tokens)])


@pytest.mark.parametrize(("world_size", "fields"), [(2, {}), (4, {"tp": 2})])
@pytest.mark.parametrize("method", METHODS)
def test_every_rank_gets_the_logits_of_whole_sequences_of_any_length(
    method: str, world_size: int, fields: dict[str, Any]
) -> None:
    for found in run_ranks(world_size, logits, cp(method, **fields), 13):
        assert difference(found, run_ranks(1, logits, ONE, 13)[0]) < 1e-14


def sent(config: dict[str, Any]) -> Counter[tuple[str, str, int]]:
    """What went over `cp` in a step beside parameters, gradients and counts."""
    trained = build(ParallelConfig(**config, dp_replicate=1))
    mine = batches(trained.mesh, 0)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(mine)
    # Of a mesh whose only axis is cp its view is called fsdp; activations have another size than any unit.
    kinds = ("all_to_all", "all_gather", "reduce_scatter")
    sizes = {KV * config["cp"], KV, QKV, OUT}
    return Counter(
        (each.kind, each.phase, each.payload_bytes)
        for each in counter.records
        if each.kind in kinds and each.payload_bytes in sizes
    )


HEAD = GLOBAL_BATCH * SEQUENCE_LENGTH // 2 * CONFIG.shape.head_dim * 8
KV = 2 * CONFIG.num_kv_heads * HEAD
QKV = CONFIG.num_heads * HEAD + KV
OUT = CONFIG.num_heads * HEAD
L = CONFIG.num_layers


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("allgather", {("all_gather", "forward", 2 * KV): L, ("reduce_scatter", "backward", 2 * KV): L}),
        # Keys and values go to the other rank once, and once more in backward, where their gradients come back.
        ("ring", {("all_to_all", "forward", KV): L, ("all_to_all", "backward", KV): 2 * L}),
        (
            "ulysses",
            {
                (kind, phase, payload): L
                for kind, phase in (("all_to_all", "forward"), ("all_to_all", "backward"))
                for payload in (QKV, OUT)
            },
        ),
    ],
)
def test_a_step_sends_what_the_method_says(method: str, expected: dict[tuple[str, str, int], int]) -> None:
    for found in run_ranks(2, sent, cp(method)):
        assert found == expected


def moe_run(config: dict[str, Any], model: dict[str, Any]) -> small_moe.MoeRun:
    return small_moe.train(ParallelConfig(**config), sgd, model, 2)


@pytest.mark.parametrize("method", METHODS)
def test_experts_are_balanced_over_whole_rows(method: str) -> None:
    model = small_moe.MODELS["sigmoid, loss, bias, shared, dense"]
    reference = run_ranks(1, moe_run, ONE, model)[0]
    run = run_ranks(2, moe_run, cp(method), model)[0]
    assert run.loads == reference.loads
    assert difference(torch.tensor(run.losses), torch.tensor(reference.losses)) < 1e-13
    worst = {fqn: difference(run.parameters[fqn], reference.parameters[fqn]) for fqn in reference.parameters}
    assert max(worst.values()) < 1e-13, worst


def saved(folder: str) -> dict[str, Tensor]:
    trained = build(ParallelConfig(**cp("ring")))
    optimizer = trained.build_optimizer(adamw)
    trained.forward_backward(batches(trained.mesh, 0))
    optimizer.step()
    save(folder, TrainState(trained=trained, optimizer=optimizer, step=1))
    return whole_parameters(trained)


def loaded(folder: str, config: dict[str, Any]) -> dict[str, Tensor]:
    trained = build(ParallelConfig(**config), seed=1)
    state = TrainState(trained=trained, optimizer=trained.build_optimizer(adamw))
    load(str(next(Path(folder).glob("step-*"))), state)
    return whole_parameters(trained)


def test_a_checkpoint_of_shared_sequences_loads_elsewhere_bit_for_bit(tmp_path: Path) -> None:
    before = run_ranks(2, saved, str(tmp_path))[0]
    for world_size, config in ((1, ONE), (2, {"tp": 2}), (2, cp("ulysses", data_parallel="zero1"))):
        for after in run_ranks(world_size, loaded, str(tmp_path), config):
            assert after.keys() == before.keys()
            assert all(after[fqn].equal(before[fqn]) for fqn in before)


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        with pytest.raises(ValueError) as caught:
            call()
        said[name] = str(caught.value)

    config = ParallelConfig(**cp("ring"))
    trained = build(config)
    mine = batches(trained.mesh, 0)
    short = [replace(mine[0], **{name: getattr(mine[0], name)[:, :30] for name in mine[0].__dict__})]
    note("length", lambda: trained.forward_backward(short))
    # Data must be chosen by dp, so both ranks of cp get the same; here each gets its own.
    other = [replace(mine[0], tokens=(mine[0].tokens + trained.mesh.coordinate("cp")) % 256)]
    note("batches", lambda: trained.forward_backward(other))
    note("cache", lambda: kv_cache(trained.source, 8).__enter__())
    with torch.device("meta"):
        model = Llama(CONFIG)
    no_cores = replace(llama_plan(CONFIG), attention_cores=())
    note("plan", lambda: parallelize(model, trained.mesh, config, no_cores))
    return said


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    for said in run_ranks(2, refusals):
        assert "splits the sequence into 4 parts" in said["length"] and "nearest legal: 28 or 32" in said["length"]
        assert "each sequence between them, so they need the same batches" in said["batches"]
        assert "the plan names no attention_cores" in said["plan"]
        assert "lay the model out without cp" in said["cache"]


def test_parts_must_divide_between_tensor_parallel_ranks_too() -> None:
    config = ParallelConfig(dp_shard=1, cp=2, cp_method="allgather", tp=4)
    with pytest.raises(ValueError, match="into 8 parts, which must divide sequence_length=36; nearest legal: 32 or 40"):
        check_sequence_length(config, 36, DENSE)
    check_sequence_length(replace(config, sequence_parallel=False), 36, DENSE)


def test_heads_that_ulysses_cannot_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="ulysses splits heads: tp x cp = 1 x 3 = 3 must divide the model's 8 heads"):
        check_layout(ParallelConfig(dp_shard=1, cp=3, cp_method="ulysses"), DENSE)


def test_whole_parameters_over_two_axes_beside_tp_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"dp_replicate=2 x cp=2 do not compose with tp=2; use .*hybrid_shard"):
        ParallelConfig(data_parallel="ddp", dp_replicate=2, cp=2, cp_method="ring", tp=2)


def repeated_heads(config: dict[str, Any]) -> Tensor:
    trained = build(ParallelConfig(**config), LlamaConfig(num_layers=1, num_kv_heads=1))
    trained.forward_backward(batches(trained.mesh, 0))
    (gradient,) = (each.grad for fqn, each in trained.named_parameters().items() if fqn.endswith("k_proj.weight"))
    assert gradient is not None
    return whole(gradient)


def test_one_key_value_head_serves_the_query_heads_of_every_rank() -> None:
    reference = run_ranks(1, repeated_heads, ONE)[0]
    for found in run_ranks(2, repeated_heads, cp("ulysses")):
        assert difference(found, reference) < 1e-13


def live_bytes_after(layout: dict[str, Any], steps: tuple[int, ...]) -> list[int]:
    """Bytes of all tensors made by steps that there still are after so many of them."""
    trained = build(ParallelConfig(**layout))
    meter, found = MemoryMeter(trained.mesh.device), []
    with meter:
        for step in range(max(steps)):
            trained.forward_backward(batches(trained.mesh, 0, 2))
            if step + 1 in steps:
                # The thread that sends lets go of what it has sent a little later.
                dist.barrier()
                time.sleep(0.1)
                gc.collect()
                found.append(meter.live_bytes)
    return found


@pytest.mark.parametrize("recomputed", ["none", "selective"])
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_no_memory_is_left_behind_by_a_step(method: str, recomputed: str) -> None:
    layout = {"cp": 2, "cp_method": method, "activation_checkpointing": recomputed}
    for early, late in run_ranks(2, live_bytes_after, layout, (2, 5)):
        assert early == late
