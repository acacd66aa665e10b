"""Low-rank adapters train as on one process under every backend and axis, and the rest of the model stays."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from models.layers.lora import LoraConfig, add_adapters, is_of_adapter
from models.llama import Llama, LlamaConfig, llama_plan
from models.moe import Moe, MoeConfig, moe_plan
from parallel import (
    CollectiveCounter,
    ParallelConfig,
    Precision,
    Trained,
    build_mesh,
    materialize,
    parallelize,
)
from parallel.ledger.parts import model_parts
from parallel.ledger.term import Traffic, counted_traffic, traffic
from parallel.ledger.traffic import StepShape, predict_traffic
from tests.parallel.small_model import Run, adamw, batches, difference, fused_adamw, sgd, whole_parameters
from tests.ranks import run_ranks

CONFIG = LlamaConfig(num_layers=4, width=32, num_heads=4, num_kv_heads=2, feed_forward_width=48)
EVERYWHERE = ("blocks.*.attention.*_proj", "blocks.*.feed_forward.*_proj")
ONE: dict[str, Any] = {"data_parallel": "none"}
PP: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}
OPTIMIZERS = {"adamw": (adamw, 1e-12), "fused adamw": (fused_adamw, 1e-12), "sgd": (sgd, 1e-13)}

LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "full_shard-2": (2, {}, "adamw"),
    "ddp-2": (2, {"data_parallel": "ddp"}, "adamw"),
    "fsdp1-2": (2, {"data_parallel": "fsdp1"}, "adamw"),
    "tp-2, recomputed": (2, {"tp": 2, "activation_checkpointing": "full"}, "sgd"),
    "cp-2 ring": (2, {"cp": 2, "cp_method": "ring"}, "adamw"),
    "pp-2 1f1b": (2, PP, "adamw"),
}
SLOW_LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "shard_grad_op-3": (3, {"strategy": "shard_grad_op"}, "fused adamw"),
    "no_shard-2, selective": (2, {"strategy": "no_shard", "activation_checkpointing": "selective"}, "sgd"),
    "hybrid_shard-2x2, recomputed": (
        4,
        {"strategy": "hybrid_shard", "dp_replicate": 2, "activation_checkpointing": "full"},
        "adamw",
    ),
    "zero1-2": (2, {"data_parallel": "zero1"}, "fused adamw"),
    "tp-2 without sequence parallel": (2, {"tp": 2, "sequence_parallel": False}, "adamw"),
    "pp-2 zbv": (2, PP | {"schedule": "zbv_zero_bubble"}, "sgd"),
    "full_shard-2 x tp-2": (4, {"tp": 2}, "fused adamw"),
    "hybrid_shard_zero2-2x2": (4, {"strategy": "hybrid_shard_zero2", "dp_replicate": 2}, "sgd"),
    "ddp-2 x tp-2": (4, {"data_parallel": "ddp", "tp": 2}, "adamw"),
    "fsdp1-2 x tp-2": (4, {"data_parallel": "fsdp1", "tp": 2}, "adamw"),
    "fsdp1 hybrid_shard-2x2": (4, {"data_parallel": "fsdp1", "strategy": "hybrid_shard", "dp_replicate": 2}, "sgd"),
    "cp-2 allgather x tp-2": (4, {"cp": 2, "cp_method": "allgather", "tp": 2}, "adamw"),
    "cp-2 ulysses, selective": (
        2,
        {"cp": 2, "cp_method": "ulysses", "activation_checkpointing": "selective"},
        "adamw",
    ),
    "pp-2 x ddp-2": (4, PP | {"data_parallel": "ddp"}, "adamw"),
    "pp-2 interleaved zero bubble": (2, PP | {"schedule": "interleaved_zero_bubble"}, "sgd"),
    "pp-2 x full_shard-2 x tp-2": (8, PP | {"schedule": "gpipe", "tp": 2}, "adamw"),
    "pp-2 x cp-2 x tp-2": (8, PP | {"cp": 2, "cp_method": "ring", "tp": 2}, "sgd"),
}


def build(config: ParallelConfig, targets: tuple[str, ...] = EVERYWHERE) -> Trained:
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(CONFIG).to(torch.float64)
    plan = add_adapters(model, llama_plan(CONFIG), LoraConfig(rank=3, alpha=6.0, targets=targets))
    trained = parallelize(model, mesh, config, plan)
    materialize(trained, seed=3)
    return trained


def train(config: ParallelConfig, optimizer: str) -> tuple[Run, dict[str, Tensor]]:
    """Five steps, and the parameters before them."""
    trained = build(config)
    before = whole_parameters(trained)
    optim = trained.build_optimizer(OPTIMIZERS[optimizer][0])
    losses, norms = [], []
    for step in range(5):
        losses.append(trained.forward_backward(batches(trained.mesh, step, 4 if config.pp > 1 else 2)).loss)
        norms.append(trained.clip_gradients(0.05).item())
        optim.step()
    return Run(losses, norms, whole_parameters(trained)), before


@cache
def one_process(optimizer: str) -> tuple[Run, dict[str, Tensor]]:
    result: tuple[Run, dict[str, Tensor]] = run_ranks(1, train, ParallelConfig(**ONE), optimizer)[0]
    return result


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)])
def test_adapters_train_like_one_process_and_the_base_stays_bitwise(name: str) -> None:
    world_size, fields, optimizer = (LAYOUTS | SLOW_LAYOUTS)[name]
    reference, start = one_process(optimizer)
    tolerance = OPTIMIZERS[optimizer][1]
    runs = run_ranks(world_size, train, ParallelConfig(**fields), optimizer)
    for run, before in runs:
        assert difference(run.losses, reference.losses) < tolerance
        assert difference(run.norms, reference.norms) < tolerance
        for fqn, values in run.parameters.items():
            # Initial values depend on seed and name alone.
            assert torch.equal(before[fqn], start[fqn])
            if is_of_adapter(fqn):
                assert difference(values, reference.parameters[fqn]) < tolerance, fqn
                assert not torch.equal(values, before[fqn]), fqn
            else:
                assert torch.equal(values, before[fqn]), fqn
    held = set().union(*(run.parameters for run, _ in runs))
    assert held == reference.parameters.keys()


def test_new_adapters_add_nothing_and_their_base_begins_as_it_would_without() -> None:
    _, start = one_process("adamw")
    plain = run_ranks(1, plain_start)[0]
    assert all(torch.equal(start[fqn], values) for fqn, values in plain.items())
    assert {fqn for fqn in start if fqn.endswith(".b.weight")} == {fqn for fqn in start if not start[fqn].any()}
    drawn = [values for fqn, values in start.items() if fqn.endswith(".a.weight")]
    assert len({tuple(each.flatten()[:3].tolist()) for each in drawn}) == len(drawn)


def plain_start() -> dict[str, Tensor]:
    mesh = build_mesh(ParallelConfig(**ONE))
    with torch.device("meta"):
        model = Llama(CONFIG).to(torch.float64)
    trained = parallelize(model, mesh, ParallelConfig(**ONE), llama_plan(CONFIG))
    materialize(trained, seed=3)
    return whole_parameters(trained)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ({"data_parallel": "ddp"}, {"data_parallel": "fsdp1"}, {"tp": 2})
        ),
    ],
)
def test_adapters_train_in_bfloat16_and_are_stored_as_their_base(fields: dict[str, Any]) -> None:
    for dtypes, first, last in run_ranks(2, in_bfloat16, fields):
        assert dtypes == {torch.float32}
        assert last < first


def in_bfloat16(fields: dict[str, Any]) -> tuple[set[torch.dtype], float, float]:
    config = ParallelConfig(**fields, precision=Precision(compute="bfloat16", reduce="float32"))
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(CONFIG)
    plan = add_adapters(model, llama_plan(CONFIG), LoraConfig(rank=3, targets=EVERYWHERE))
    trained = parallelize(model, mesh, config, plan)
    materialize(trained)
    optimizer = trained.build_optimizer(lambda named: torch.optim.AdamW(list(named.values()), lr=1e-2))
    losses = []
    for _ in range(6):
        losses.append(trained.forward_backward(batches(mesh, 0)).loss)
        optimizer.step()
    return {each.dtype for each in trained.named_parameters().values()}, losses[0], losses[-1]


def test_a_stage_with_nothing_to_train_is_refused_before_anything_is_built() -> None:
    for said in run_ranks(2, frozen_stage):
        assert "all of stage 0 (embed to blocks." in said
        assert "train a parameter of each stage" in said


def frozen_stage() -> str:
    with pytest.raises(ValueError) as refusal:
        build(ParallelConfig(**PP), ("blocks.3.attention.q_proj",))
    return str(refusal.value)


BESIDE_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"tp": 2}),
    "ep 2": (2, {"ep": 2}),
    "tp 2 without sequence parallel": (2, {"tp": 2, "sequence_parallel": False}),
    "ep 2 x tp 2": (4, {"ep": 2, "tp": 2}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (at > 0)) for at, name in enumerate(BESIDE_EXPERTS)]
)
def test_adapters_in_a_model_with_experts_train_like_one_process(name: str) -> None:
    [reference] = run_ranks(1, beside_experts, ParallelConfig(**ONE))
    world_size, fields = BESIDE_EXPERTS[name]
    for run in run_ranks(world_size, beside_experts, ParallelConfig(**fields)):
        assert difference(run.losses, reference.losses) < 1e-13
        assert difference(run.norms, reference.norms) < 1e-13
        worst = {fqn: difference(run.parameters[fqn], values) for fqn, values in reference.parameters.items()}
        assert max(worst.values()) < 1e-13, worst


def beside_experts(config: ParallelConfig) -> Run:
    """Five steps of SGD on adapters of attention and of the shared expert."""
    mesh, model_config = build_mesh(config), MoeConfig(num_layers=2, init_std=0.2, shared_expert_width=24)
    with torch.device("meta"):
        model = Moe(model_config).to(torch.float64)
    targets = ("blocks.*.attention.*_proj", "blocks.*.feed_forward.shared_expert.*_proj")
    plan = add_adapters(model, moe_plan(model_config), LoraConfig(rank=3, targets=targets))
    trained = parallelize(model, mesh, config, plan)
    materialize(trained)
    optimizer = trained.build_optimizer(sgd)
    losses, norms = [], []
    for step in range(5):
        losses.append(trained.forward_backward(batches(mesh, step, 2)).loss)
        norms.append(trained.clip_gradients(0.1).item())
        optimizer.step()
    return Run(losses, norms, whole_parameters(trained))


TRAFFIC: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "ddp": {"data_parallel": "ddp"},
    "zero1": {"data_parallel": "zero1"},
    "fsdp1": {"data_parallel": "fsdp1"},
    "fsdp1 shard_grad_op": {"data_parallel": "fsdp1", "strategy": "shard_grad_op"},
    "tp": {"tp": 2},
    "tp without sequence parallel": {"tp": 2, "sequence_parallel": False},
    "tp, recomputed": {"tp": 2, "activation_checkpointing": "full"},
    "cp": {"cp": 2, "cp_method": "ulysses"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("tp" not in name)) for name in TRAFFIC]
)
def test_the_ledger_predicts_what_adapters_send(name: str) -> None:
    for predicted, counted in run_ranks(2, traffic_of_a_step, TRAFFIC[name]):
        assert predicted == counted


def traffic_of_a_step(fields: dict[str, Any]) -> tuple[Traffic, Traffic]:
    trained = build(ParallelConfig(**fields))
    optimizer = trained.build_optimizer(adamw)
    mine = batches(trained.mesh, 0, 2)
    for _ in range(3):
        with CollectiveCounter(trained.mesh) as counter:
            trained.forward_backward(mine)
            trained.clip_gradients(None)
            optimizer.step()
    with torch.device("meta"):
        model = Llama(CONFIG).to(torch.float64)
    plan = add_adapters(model, llama_plan(CONFIG), LoraConfig(rank=3, alpha=6.0, targets=EVERYWHERE))
    tokens = sum(each.tokens.numel() for each in mine)
    shape = StepShape(num_micro_batches=2, num_tokens=tokens, clips=True)
    return traffic(predict_traffic(model_parts(model, trained.config, plan), shape)), counted_traffic(counter.records)
