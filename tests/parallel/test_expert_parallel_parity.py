"""Experts that ranks share give the numbers of one process, with every other axis and policy."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel.compile
from parallel import ParallelConfig, Sharding
from tests.models.moe.small_moe import DEEP, MODELS, MoeRun, train
from tests.parallel.small_model import adamw, difference, sgd
from tests.ranks import run_ranks

OPTIMIZERS: dict[str, tuple[Any, float]] = {"adamw": (adamw, 1e-12), "sgd": (sgd, 1e-13)}
SMALL = MODELS["softmax, loss"]
LARGE = MODELS["sigmoid, loss, bias, shared, dense"]
DROPPING = LARGE | {"capacity_factor": 0.8}
# One expert a rank, which two ranks then shard along its width.
FEW = {"num_experts": 2, "num_experts_per_token": 1}
HYBRID = {"strategy": "hybrid_shard", "dp_replicate": 2}
BY_SIZE = Sharding(units="size", unit_min_parameters=5000, forward_prefetch=2, backward_prefetch=2)
# Ranks, layout, model, micro-batches; gradients are clipped in all of them, and valid tokens uneven.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "ep 2": (2, {"ep": 2}, LARGE, 2),
    "ep 2 x expert_fsdp 2": (4, {"ep": 2}, LARGE, 1),
    "ep 2 x tp 2, recomputed": (4, {"ep": 2, "tp": 2, "activation_checkpointing": "full"}, LARGE, 2),
    "hybrid 2 x 2 x ep 2": (8, HYBRID | {"dp_shard": 4, "ep": 2}, SMALL, 1),
    "cp 2 is ep 2, dropping": (2, {"cp": 2, "cp_method": "ring", "ep": 2}, DROPPING, 2),
    "pp 2 x ep 2": (4, {"pp": 2, "schedule": "1f1b", "ep": 2}, LARGE, 4),
}
MORE: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "ep 4": (4, {"ep": 4}, LARGE, 2),
    "ep 4 x expert_fsdp 2": (8, {"ep": 4}, LARGE, 1),
    "ep 2, one expert on two ranks": (4, {"ep": 2}, FEW, 2),
    "ep 2 x tp 2, one expert on two ranks": (8, {"ep": 2, "tp": 2}, FEW, 1),
    "shard_grad_op": (4, {"ep": 2, "strategy": "shard_grad_op"}, LARGE, 2),
    "hybrid 2 x ep 2": (4, HYBRID | {"ep": 2}, LARGE, 2),
    "hybrid_shard_zero2": (8, HYBRID | {"strategy": "hybrid_shard_zero2", "dp_shard": 4, "ep": 2}, SMALL, 1),
    "ep 2 x tp 2 x dp 2": (8, {"ep": 2, "tp": 2}, LARGE, 1),
    "hybrid 2 x ep 2 x tp 2": (8, HYBRID | {"ep": 2, "tp": 2}, LARGE, 1),
    "tp without sequence parallel": (4, {"ep": 2, "tp": 2, "sequence_parallel": False}, LARGE, 2),
    "ep 2 in dp 2 x cp 2": (4, {"cp": 2, "cp_method": "allgather", "ep": 2}, LARGE, 1),
    "ep 4 over dp 2 x cp 2": (4, {"cp": 2, "cp_method": "ulysses", "ep": 4}, LARGE, 2),
    "ep 3 over neither dp nor cp": (6, {"cp": 2, "cp_method": "allgather", "ep": 3}, {"num_experts": 6}, 1),
    "cp 2 x tp 2 x ep 2": (8, {"cp": 2, "cp_method": "ring", "ep": 2, "tp": 2}, DROPPING, 1),
    "zero bubbles": (4, {"pp": 2, "schedule": "zbv_zero_bubble", "ep": 2}, DEEP, 4),
    "pp 2 x tp 2 x ep 2": (8, {"pp": 2, "schedule": "1f1b", "ep": 2, "tp": 2}, LARGE, 4),
    "some ops recomputed": (4, {"ep": 2, "activation_checkpointing": "selective"}, LARGE, 2),
    "some ops recomputed, nothing gathered": (2, {"ep": 2, "activation_checkpointing": "selective"}, SMALL, 1),
    "some ops recomputed, prefetched": (
        4,
        {
            "ep": 2,
            "activation_checkpointing": "selective",
            "sharding": Sharding(forward_prefetch=1, backward_prefetch=1),
        },
        LARGE,
        2,
    ),
    "all but matmuls recomputed x tp": (
        8,
        {"ep": 2, "tp": 2, "activation_checkpointing": "selective", "activation_checkpoint_policy": "matmuls"},
        LARGE,
        1,
    ),
    "every second block recomputed": (
        4,
        {"ep": 2, "activation_checkpointing": "full", "activation_checkpoint_every": 2},
        LARGE,
        2,
    ),
    "reduced last": (4, {"ep": 2, "reduce_gradients": "last"}, LARGE, 3),
    "offloaded": (4, {"ep": 2, "sharding": Sharding(cpu_offload=True)}, LARGE, 2),
    "units by size, prefetched": (4, {"ep": 2, "sharding": BY_SIZE}, LARGE, 2),
    "one unit beside experts": (4, {"ep": 2, "sharding": Sharding(units="model")}, LARGE, 1),
    "last unit kept": (4, {"ep": 2, "sharding": Sharding(keep_last_unit=True)}, LARGE, 1),
    "others kept by pairs": (4, {"ep": 2, "sharding": Sharding(reshard_group=2)}, LARGE, 1),
    "dropping": (4, {"ep": 2, "tp": 2}, DROPPING, 3),
}


COMPILED: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "one process": (1, {"data_parallel": "none"}, LARGE, 1),
    "ep 2": (2, {"ep": 2}, SMALL, 1),
    "ep 2 x tp 2, recomputed": (4, {"ep": 2, "tp": 2, "activation_checkpointing": "full"}, LARGE, 1),
    "tp without sequence parallel": (2, {"tp": 2, "sequence_parallel": False}, SMALL, 1),
    "cp 2 is ep 2, dropping": (2, {"cp": 2, "cp_method": "ulysses", "ep": 2}, DROPPING, 1),
    "pp 2 x ep 2": (4, {"pp": 2, "schedule": "1f1b", "ep": 2}, LARGE, 4),
}


@cache
def one_process(model: tuple[tuple[str, Any], ...], optimizer: str) -> MoeRun:
    """The numbers to reach: one process, the global batch in one piece."""
    (run,) = run_ranks(1, train, ParallelConfig(data_parallel="none"), OPTIMIZERS[optimizer][0], dict(model), 1)
    return run


def assert_parity(
    world_size: int, fields: dict[str, Any], model: dict[str, Any], num_micro_batches: int, optimizer: str
) -> None:
    function = train_compiled if fields.get("compile") else train
    factory, tolerance = OPTIMIZERS[optimizer]
    runs = run_ranks(world_size, function, ParallelConfig(**fields), factory, model, num_micro_batches, timeout_s=280)
    assert all((run.losses, run.norms, run.loads) == (runs[0].losses, runs[0].norms, runs[0].loads) for run in runs)
    run, reference = runs[0], one_process(tuple(model.items()), optimizer)
    assert run.loads == reference.loads and run.dropped == reference.dropped
    assert all(each > 0 for each in run.dropped) == ("capacity_factor" in model)
    assert difference(run.losses, reference.losses) < tolerance
    assert difference(run.norms, reference.norms) < tolerance
    # Each stage of a pipeline has its own.
    parameters = {fqn: values for each in runs for fqn, values in each.parameters.items()}
    assert parameters.keys() == reference.parameters.keys()
    worst = {fqn: difference(parameters[fqn], reference.parameters[fqn]) for fqn in reference.parameters}
    assert max(worst.values()) < tolerance, worst


def train_compiled(config: ParallelConfig, *arguments: Any) -> MoeRun:
    """The graphs of compiled blocks, run as they are; where ep is the only axis with generated code, which is slow."""
    backend = "inductor" if config.ep == dist.get_world_size() > 1 and config.cp == 1 else "aot_eager"
    before, parallel.compile.BACKEND = parallel.compile.BACKEND, backend
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    try:
        run = train(config, *arguments)
    finally:
        parallel.compile.BACKEND = before
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > num_graphs
    return run


@pytest.mark.parametrize("name", LAYOUTS)
def test_five_sgd_steps_equal_one_process(name: str) -> None:
    assert_parity(*LAYOUTS[name], "sgd")


def test_five_adamw_steps_equal_one_process() -> None:
    assert_parity(*LAYOUTS["ep 2 x expert_fsdp 2"], "adamw")


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_five_sgd_steps_of_every_other_layout_equal_one_process(name: str) -> None:
    assert_parity(*MORE[name], "sgd")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "ep 2 x expert_fsdp 2"])
def test_five_adamw_steps_of_the_others_equal_one_process(name: str) -> None:
    assert_parity(*LAYOUTS[name], "adamw")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMPILED)
def test_five_steps_of_compiled_blocks_equal_one_process(name: str) -> None:
    world_size, fields, model, num_micro_batches = COMPILED[name]
    assert_parity(world_size, fields | {"compile": True}, model, num_micro_batches, "sgd")
