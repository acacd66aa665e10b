"""Compiled blocks train like one process along every axis and under every backend, the embedding too."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel.compile
from models.layers.lora import LoraConfig, add_adapters
from models.llama import Llama, LlamaConfig, llama_plan
from parallel import LossScaling, ParallelConfig, Precision, build_mesh, materialize, parallelize
from tests.parallel.small_model import batches, difference, sgd, whole, whole_parameters
from tests.ranks import run_ranks

ONE: dict[str, Any] = {"data_parallel": "none"}
FULL: dict[str, Any] = {"activation_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective"}
TP: dict[str, Any] = {"tp": 2}
PP: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}
# Four blocks, so that each of two ranks can have two stages.
MODEL = LlamaConfig(num_layers=4, width=32, num_heads=4, num_kv_heads=2, feed_forward_width=48)
TIMEOUT_S = 280.0


def cp(method: str) -> dict[str, Any]:
    return {"cp": 2, "cp_method": method}


# Graphs run as they are here; that of the first row is in the fast group.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp 2 ring, selective": (2, cp("ring") | SELECTIVE),
    "pp 2 1f1b, full": (2, PP | FULL),
    "cp 2 allgather, selective": (2, cp("allgather") | SELECTIVE),
    "cp 2 ulysses, selective": (2, cp("ulysses") | SELECTIVE),
    "cp 2 allgather, full": (2, cp("allgather") | FULL),
    "cp 2 ulysses, full": (2, cp("ulysses") | FULL),
    "cp 2 ring x tp 2": (4, cp("ring") | TP),
    "cp 2 allgather x tp 2, full": (4, cp("allgather") | TP | FULL),
    "cp 2 ulysses x tp 2, full": (4, cp("ulysses") | TP | FULL),
    "cp 2 ring x full_shard 2": (4, cp("ring")),
    "pp 2 interleaved, selective": (2, PP | SELECTIVE | {"schedule": "interleaved_1f1b"}),
    "pp 2 x tp 2": (4, PP | TP),
    "pp 2 x cp 2": (4, PP | cp("ring")),
    "pp 2 x full_shard 2": (4, PP),
    "no_shard 2": (2, {"strategy": "no_shard"}),
    "hybrid_shard 2 x 2": (4, {"strategy": "hybrid_shard", "dp_replicate": 2}),
    "ddp 2 x tp 2": (4, {"data_parallel": "ddp"} | TP),
    "zero1 2, full": (2, {"data_parallel": "zero1"} | FULL),
    "fsdp1 2 x tp 2": (4, {"data_parallel": "fsdp1"} | TP),
}
NUM_FAST = 1
# With generated code, which takes up to a minute each.
GENERATED: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp 2": (2, {"data_parallel": "ddp"}),
    "fsdp1 2": (2, {"data_parallel": "fsdp1"}),
    "cp 2 allgather": (2, cp("allgather")),
    "cp 2 ring": (2, cp("ring")),
    "cp 2 ulysses": (2, cp("ulysses")),
    "pp 2 1f1b": (2, PP),
}


def two_steps(config: ParallelConfig, backend: str) -> tuple[list[float], dict[str, Tensor], Tensor | None, int]:
    """Losses, parameters, the first gradient of the embedding if this rank has one, and how many graphs there are."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    parallel.compile.BACKEND = backend
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(MODEL).to(torch.float64)
    trained = parallelize(model, mesh, config, llama_plan(MODEL))
    materialize(trained)
    optimizer = trained.build_optimizer(sgd)
    losses, embedding = [], None
    for step in range(2):
        losses.append(trained.forward_backward(batches(mesh, step, 4 if config.pp > 1 else 2)).loss)
        held = trained.named_parameters().get("embed.weight")
        if step == 0 and held is not None and held.grad is not None:
            embedding = whole(trained.backend.to_canonical("embed.weight", held.grad))
        optimizer.step()
    return losses, whole_parameters(trained), embedding, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@cache
def one_process() -> Any:
    return run_ranks(1, two_steps, ParallelConfig(**ONE), "eager")[0]


def assert_like_one_process(world_size: int, fields: dict[str, Any], backend: str) -> None:
    config = ParallelConfig(**fields, compile=True)
    runs = run_ranks(world_size, two_steps, config, backend, timeout_s=TIMEOUT_S)
    losses, parameters, embedding, _ = one_process()
    found: set[str] = set()
    for own_losses, own, gradient, num_graphs in runs:
        # Blocks are alike, so that they share their code.
        assert num_graphs == 1
        assert difference(own_losses, losses) < 1e-13
        worst = {fqn: difference(values, parameters[fqn]) for fqn, values in own.items()}
        assert max(worst.values()) < 1e-13, worst
        if gradient is not None:
            assert difference(gradient, embedding) < 1e-13
            found.add("embed.weight's gradient")
        found |= own.keys()
    assert found == parameters.keys() | {"embed.weight's gradient"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (at >= NUM_FAST)) for at, name in enumerate(LAYOUTS)]
)
def test_compiled_graphs_train_like_one_process(name: str) -> None:
    assert_like_one_process(*LAYOUTS[name], "aot_eager")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", GENERATED)
def test_generated_code_trains_like_one_process(name: str) -> None:
    assert_like_one_process(*GENERATED[name], "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, TP, PP, cp("ring")], ids=["full_shard 2", "tp 2", "pp 2", "cp 2"])
def test_compiled_blocks_with_adapters_train_as_they_do_uncompiled(fields: dict[str, Any]) -> None:
    plain, compiled = (run_ranks(2, of_adapters, ParallelConfig(**fields, compile=each)) for each in (False, True))
    for (one_losses, one), (losses, own) in zip(plain, compiled, strict=True):
        assert difference(losses, one_losses) < 1e-13
        assert max(difference(own[fqn], values) for fqn, values in one.items()) < 1e-13


def of_adapters(config: ParallelConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps, and the parameters after them."""
    parallel.compile.BACKEND = "aot_eager"
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(MODEL).to(torch.float64)
    targets = ("blocks.*.attention.*_proj", "blocks.*.feed_forward.*_proj")
    plan = add_adapters(model, llama_plan(MODEL), LoraConfig(rank=3, targets=targets))
    trained = parallelize(model, mesh, config, plan)
    materialize(trained)
    optimizer = trained.build_optimizer(sgd)
    losses = []
    for step in range(2):
        losses.append(trained.forward_backward(batches(mesh, step, 4)).loss)
        optimizer.step()
    return losses, whole_parameters(trained)


@pytest.mark.slow
def test_compiled_blocks_compute_in_float16_and_skip_overflows() -> None:
    for skipped, value, loss in run_ranks(2, in_float16):
        assert skipped == [True, False]
        assert value == 2.0**10
        assert loss == pytest.approx(one_process()[0][0], rel=1e-2)


def in_float16() -> tuple[list[bool], float, float]:
    parallel.compile.BACKEND = "aot_eager"
    scaling = LossScaling(initial=2.0**50, backoff=2.0**-40)
    precision = Precision(compute="float16", reduce="float32", loss_scaling=scaling)
    config = ParallelConfig(compile=True, precision=precision)
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(MODEL)
    trained = parallelize(model, mesh, config, llama_plan(MODEL))
    materialize(trained)
    results = [trained.forward_backward(batches(mesh, 0)) for _ in range(2)]
    assert trained.loss_scale is not None
    return [each.skipped for each in results], trained.loss_scale.value, results[-1].loss
