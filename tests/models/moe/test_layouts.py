"""Tests that a model with experts gives the numbers of one process on every layout, and is saved and loaded."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from checkpoint import TrainState, load, save
from parallel import ParallelConfig
from tests.models.moe.small_moe import DEEP, MODELS, MoeRun, build, train
from tests.parallel.small_model import adamw, batches, difference, sgd, whole_parameters
from tests.ranks import run_ranks

OPTIMIZERS: dict[str, tuple[Any, float]] = {"adamw": (adamw, 1e-12), "sgd": (sgd, 1e-13)}
# Ranks, layout, micro-batches
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "full_shard-2": (2, {}, 1),
    "full_shard-2, accumulated": (2, {"reduce_gradients": "last"}, 3),
    "full_shard-2, recomputed": (2, {"activation_checkpointing": "full"}, 2),
    "ddp-2": (2, {"data_parallel": "ddp"}, 2),
    "fsdp1-2": (2, {"data_parallel": "fsdp1"}, 1),
    "tp-2": (2, {"tp": 2}, 2),
    "tp-2, whole sequences": (2, {"tp": 2, "sequence_parallel": False}, 2),
    "ddp-2 x tp-2": (4, {"data_parallel": "ddp", "tp": 2}, 2),
    "fsdp1-2 x tp-2": (4, {"data_parallel": "fsdp1", "tp": 2}, 1),
    "zero1-2": (2, {"data_parallel": "zero1"}, 1),
    "pp-2": (2, {"pp": 2, "schedule": "1f1b"}, 4),
    "hybrid_shard-2x2": (4, {"strategy": "hybrid_shard", "dp_replicate": 2}, 2),
}


@cache
def one_process(model: str, optimizer: str) -> MoeRun:
    """The numbers to reach: one process, the global batch in one piece."""
    fields = MODELS.get(model, DEEP)
    (run,) = run_ranks(1, train, ParallelConfig(data_parallel="none"), OPTIMIZERS[optimizer][0], fields, 1)
    return run


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if " x tp" in name else []) for name in LAYOUTS]
)
def test_five_steps_equal_one_process(layout: str, model: str, optimizer: str) -> None:
    assert_parity(*LAYOUTS[layout], model, optimizer)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv_zero_bubble"])
def test_stages_hand_on_the_balance_loss(schedule: str) -> None:
    assert_parity(2, {"pp": 2, "schedule": schedule}, 4, "deep", "sgd")


def assert_parity(world_size: int, fields: dict[str, Any], num_micro_batches: int, model: str, optimizer: str) -> None:
    factory, tolerance = OPTIMIZERS[optimizer]
    config = ParallelConfig(**fields)
    runs = run_ranks(world_size, train, config, factory, MODELS.get(model, DEEP), num_micro_batches)
    assert all((run.losses, run.norms, run.loads) == (runs[0].losses, runs[0].norms, runs[0].loads) for run in runs)
    run, reference = runs[0], one_process(model, optimizer)
    assert run.loads == reference.loads
    assert difference(run.losses, reference.losses) < tolerance
    assert difference(run.norms, reference.norms) < tolerance
    # Each stage of a pipeline has its own.
    parameters = {fqn: values for each in runs for fqn, values in each.parameters.items()}
    assert parameters.keys() == reference.parameters.keys()
    worst = {fqn: difference(parameters[fqn], reference.parameters[fqn]) for fqn in reference.parameters}
    assert max(worst.values()) < tolerance, worst


def _refusal() -> str:
    with pytest.raises(ValueError) as refusal:
        build(ParallelConfig(compile=True, activation_checkpointing="selective"), MODELS["softmax, loss"])
    return str(refusal.value)


def test_ops_cannot_be_chosen_in_compiled_blocks_with_experts() -> None:
    for said in run_ranks(2, _refusal):
        assert "use activation_checkpointing='full', or compile=False" in said


def test_torch_compiles_the_kernel_of_experts_in_bfloat16_alone() -> None:
    """A reason to leave experts out of the graph; once this fails it is void."""
    matmul = torch.compile(F.grouped_mm, backend="eager")
    offsets = torch.tensor([3, 8], dtype=torch.int32)
    matmul(torch.randn(8, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16(), offs=offsets)
    with pytest.raises(RuntimeError, match="Expected inputs of BF16 type"):
        matmul(torch.randn(8, 16), torch.randn(2, 16, 16), offs=offsets)


def _save(folder: str) -> dict[str, Any]:
    trained = build(ParallelConfig(), MODELS["sigmoid, loss, bias, shared, dense"])
    optimizer = trained.build_optimizer(adamw)
    trained.forward_backward(batches(trained.mesh, 0))
    optimizer.step()
    save(folder, TrainState(trained=trained, optimizer=optimizer, step=1))
    return whole_parameters(trained)


def _load(folder: str, config: ParallelConfig) -> dict[str, Any]:
    trained = build(config, MODELS["sigmoid, loss, bias, shared, dense"])
    optimizer = trained.build_optimizer(adamw)
    load(str(next(Path(folder).glob("step-*"))), TrainState(trained=trained, optimizer=optimizer))
    return whole_parameters(trained)


def test_a_checkpoint_holds_experts_and_selection_biases_on_any_layout(tmp_path: Path) -> None:
    saved = run_ranks(2, _save, str(tmp_path))[0]
    assert saved["blocks.0.feed_forward.router.selection_bias"].abs().min() > 0
    for world_size, config in ((1, ParallelConfig(data_parallel="none")), (2, ParallelConfig(data_parallel="ddp"))):
        for loaded in run_ranks(world_size, _load, str(tmp_path), config):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[fqn], saved[fqn]) for fqn in saved)
