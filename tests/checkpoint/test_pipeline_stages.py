"""Checkpoints do not know about pipeline stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import TrainState, load, save
from checkpoint.canonical import MODEL_PREFIX
from checkpoint.state import flatten
from models.llama.config import LlamaConfig
from parallel import ParallelConfig, Trained
from tests.parallel.small_model import adamw, batches, build, whole
from tests.ranks import run_ranks

MODEL: dict[str, Any] = {"num_layers": 4, "tied_embeddings": True}
ONE: tuple[int, dict[str, Any]] = (1, {"data_parallel": "none"})
FSDP: tuple[int, dict[str, Any]] = (2, {})
PIPELINE: tuple[int, dict[str, Any]] = (2, {"pp": 2, "schedule": "1f1b"})
INTERLEAVED: tuple[int, dict[str, Any]] = (2, {"pp": 2, "schedule": "interleaved_1f1b"})
V: tuple[int, dict[str, Any]] = (2, {"pp": 2, "schedule": "zbv_zero_bubble"})
SHARDED: tuple[int, dict[str, Any]] = (4, {"pp": 2, "schedule": "1f1b", "dp_shard": 2})


def state_of(layout: dict[str, Any]) -> tuple[Trained, TrainState]:
    trained = build(ParallelConfig(**layout), LlamaConfig(**MODEL), seed=3)
    return trained, TrainState(trained=trained, optimizer=trained.build_optimizer(adamw))


def values(state: TrainState) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in sorted(flatten(state, 1).tensors.items())}


def train_and_save(folder: Path, layout: dict[str, Any]) -> dict[str, Tensor]:
    trained, state = state_of(layout)
    for step in range(2):
        trained.forward_backward(batches(trained.mesh, step, 4))
        state.optimizer.step()  # type: ignore[union-attr]
    save(folder, state)
    return values(state)


def load_and_step(folder: Path, layout: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    trained, state = state_of(layout)
    load(folder, state)
    loaded = values(state)
    return loaded, trained.forward_backward(batches(trained.mesh, 2, 4)).loss


@pytest.mark.parametrize(
    ("before", "after"),
    [(PIPELINE, ONE), (ONE, PIPELINE), (SHARDED, FSDP), (FSDP, SHARDED), (PIPELINE, INTERLEAVED), (INTERLEAVED, V)],
    ids=["stages-one", "one-stages", "sharded stages-fsdp", "fsdp-sharded stages", "stages-interleaved", "loop-v"],
)
def test_a_state_goes_bitwise_from_one_cut_to_another(
    before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    saved: dict[str, Tensor] = {}
    for held in run_ranks(before[0], train_and_save, tmp_path, before[1]):
        for name, tensor in held.items():
            assert torch.equal(saved.setdefault(name, tensor), tensor), name
    results = run_ranks(after[0], load_and_step, tmp_path, after[1])
    assert set().union(*(held for held, _ in results)) == saved.keys()
    for held, loss in results:
        assert all(torch.equal(tensor, saved[name]) for name, tensor in held.items())
        assert loss == pytest.approx(results[0][1], abs=0)
    assert any(name.startswith(MODEL_PREFIX) for name in saved)


def load_too_little(folder: Path) -> str:
    state = TrainState(trained=build(ParallelConfig(**PIPELINE[1]), LlamaConfig(**{**MODEL, "num_layers": 3})))
    with pytest.raises(ValueError) as caught:
        load(folder, state, parts=("model",))
    return str(caught.value)


def test_what_no_stage_takes_is_listed(tmp_path: Path) -> None:
    run_ranks(2, train_and_save, tmp_path, PIPELINE[1])
    for message in run_ranks(2, load_too_little, tmp_path):
        assert "model.blocks.3.attention.q_proj.weight" in message
        assert "model.blocks.2" not in message
