"""What ranks that share experts save, load, begin with and say is what one process would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint import TrainState, load, save
from parallel import ParallelConfig
from tests.models.moe.small_moe import MODELS, build
from tests.parallel.small_model import adamw, batches, difference, whole_parameters
from tests.ranks import run_ranks

LARGE = MODELS["sigmoid, loss, bias, shared, dense"]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"data_parallel": "none"}),
    "ep 2 x expert_fsdp 2": (4, {"ep": 2}),
    "ep 2 x tp 2": (4, {"ep": 2, "tp": 2}),
}
# Every pair of more layouts is in the tests of checkpoints.
PAIRS = [("ep 2 x tp 2", "ep 2 x expert_fsdp 2"), ("ep 2 x expert_fsdp 2", "one process")]


def values_of(trained: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every parameter and its first moments, whole."""
    values = whole_parameters(trained)
    for fqn, each in trained.named_parameters().items():
        if each in optimizer.state:
            moment = optimizer.state[each]["exp_avg"]
            values[f"{fqn}.exp_avg"] = moment.full_tensor() if isinstance(moment, DTensor) else moment
    return values


def saved_values(folder: str, fields: dict[str, Any]) -> dict[str, Tensor]:
    trained = build(ParallelConfig(**fields), LARGE)
    optimizer = trained.build_optimizer(adamw)
    trained.forward_backward(batches(trained.mesh, 0, trained.config.pp))
    optimizer.step()
    save(folder, TrainState(trained=trained, optimizer=optimizer, step=1))
    return values_of(trained, optimizer)


def loaded_values(folder: str, fields: dict[str, Any]) -> dict[str, Tensor]:
    trained = build(ParallelConfig(**fields), LARGE)
    optimizer = trained.build_optimizer(adamw)
    load(str(next(Path(folder).glob("step-*"))), TrainState(trained=trained, optimizer=optimizer))
    return values_of(trained, optimizer)


def assert_the_same(saved: str, loaded: str, folder: Path) -> None:
    runs = run_ranks(LAYOUTS[saved][0], saved_values, str(folder), LAYOUTS[saved][1])
    before = {name: value for run in runs for name, value in run.items()}
    assert any(name.endswith("experts.gate_proj.exp_avg") for name in before)
    runs = run_ranks(LAYOUTS[loaded][0], loaded_values, str(folder), LAYOUTS[loaded][1])
    after = {name: value for run in runs for name, value in run.items()}
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_checkpoint_is_the_same_bits_on_another_layout_of_experts(saved: str, loaded: str, tmp_path: Path) -> None:
    assert_the_same(saved, loaded, tmp_path)


def initial_values(fields: dict[str, Any]) -> dict[str, Tensor]:
    return whole_parameters(build(ParallelConfig(**fields), LARGE))


def test_initial_values_do_not_depend_on_who_holds_an_expert() -> None:
    (expected,) = run_ranks(1, initial_values, {"data_parallel": "none"})
    for found in run_ranks(4, initial_values, {"ep": 2, "tp": 2}):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)


def said_of(fields: dict[str, Any]) -> tuple[Tensor, float]:
    """Logits of some tokens, the same on every rank, and the loss of an evaluation."""
    trained = build(ParallelConfig(**fields), LARGE | {"capacity_factor": 0.8})
    tokens = torch.randint(0, 256, (2, 14), generator=torch.Generator().manual_seed(0))
    return trained.logits(tokens), trained.evaluate(batches(trained.mesh, 0)).loss


def test_logits_and_evaluations_are_those_of_one_process() -> None:
    ((logits, loss),) = run_ranks(1, said_of, {"data_parallel": "none"})
    for fields in ({"ep": 2, "tp": 2}, {"ep": 4, "cp": 2, "cp_method": "ring"}):
        for found, evaluated in run_ranks(4, said_of, fields):
            assert difference(found, logits) < 1e-12 and difference([evaluated], [loss]) < 1e-12
