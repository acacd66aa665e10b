"""What a run with experts saves on one mix of axes it loads on every other, and goes on with the same losses."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import TrainState, load, save
from models.moe import MoeConfig
from parallel import Batch, Mesh, ParallelConfig, Trained
from parallel.replicas import own_part
from tests.checkpoint.states import forget_meshes
from tests.models.moe.small_moe import build
from tests.parallel.small_model import adamw, difference
from tests.ranks import run_ranks

# Four layers for four stages; one of them is dense, and routers have biases that no gradient moves.
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "width": 16,
    "num_heads": 4,
    "num_kv_heads": 4,
    "feed_forward_width": 12,
    "expert_width": 6,
    "num_experts": 4,
    "vocab_size": 37,
    "max_sequence_length": 8,
    "dense_layers": (1,),
    "balance_loss": 0.1,
    "balance_rate": 0.01,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (1, {"data_parallel": "none"}),
    "full_shard 2": (2, {}),
    "cp 2, ring": (2, {"cp": 2, "cp_method": "ring"}),
    "ep 2": (2, {"ep": 2}),
    "pp 2, zero bubble v": (2, {"pp": 2, "schedule": "zbv_zero_bubble"}),
    "tp 2 x cp 2, ulysses": (4, {"tp": 2, "cp": 2, "cp_method": "ulysses"}),
    "pp 4": (4, {"pp": 4, "schedule": "1f1b"}),
    "pp 2 x full_shard 2, interleaved": (4, {"pp": 2, "schedule": "interleaved_1f1b"}),
    "pp 2 x ddp 2": (4, {"pp": 2, "schedule": "gpipe", "data_parallel": "ddp", "dp_replicate": 2}),
    "pp 2 x cp 2, allgather": (4, {"pp": 2, "schedule": "1f1b", "cp": 2, "cp_method": "allgather"}),
    "ep 4": (4, {"ep": 4}),
    "ep 2 x expert_fsdp 2": (4, {"ep": 2}),
    "ep 2 x tp 2": (4, {"ep": 2, "tp": 2}),
    "hybrid 2 x ep 2": (4, {"strategy": "hybrid_shard", "dp_replicate": 2, "ep": 2}),
    "pp 2 x ep 2": (4, {"pp": 2, "schedule": "1f1b", "ep": 2}),
}
# From these a run goes on; it holds what it loads bit for bit from all.
FOLLOWED = ("none", "pp 2 x ep 2")
# 3-D and 4-D meshes, and back.
LARGE: dict[str, tuple[int, dict[str, Any]]] = {
    "pp 2 x full_shard 2 x tp 2": (8, {"pp": 2, "schedule": "1f1b", "tp": 2}),
    "cp 2 x full_shard 2 x tp 2": (8, {"cp": 2, "cp_method": "ring", "tp": 2}),
    "pp 2 x cp 2 x full_shard 2": (8, {"pp": 2, "schedule": "interleaved_1f1b", "cp": 2, "cp_method": "ring"}),
    "hybrid 2 x 2 x ep 2": (8, {"strategy": "hybrid_shard", "dp_replicate": 2, "ep": 2, "dp_shard": 4}),
    "ep 2 x tp 2 x full_shard 2": (8, {"ep": 2, "tp": 2}),
}
TIMEOUT_S = 300.0
MICRO_BATCHES = 4
Digests = dict[str, str]


def batches(mesh: Mesh, step: int) -> list[Batch]:
    """This rank's part of the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, MODEL["vocab_size"], (16, 9), generator=generator)
    mine = tokens.chunk(mesh.degree("dp"))[mesh.coordinate("dp")]
    return [Batch.from_tokens(rows[:, :-1], labels=rows[:, 1:]) for rows in mine.chunk(MICRO_BATCHES)]


def new_state(fields: dict[str, Any]) -> TrainState:
    """A run that has done nothing."""
    trained = build(ParallelConfig(**fields), MODEL)
    return TrainState(trained=trained, optimizer=trained.build_optimizer(adamw))


def go_on(state: TrainState, steps: int) -> list[float]:
    """The losses of the next steps."""
    trained, losses = state.trained, []
    assert isinstance(trained, Trained) and state.optimizer is not None
    for _ in range(steps):
        losses.append(trained.forward_backward(batches(trained.mesh, state.step)).loss)
        trained.clip_gradients(1.0)
        state.optimizer.step()
        state.step += 1
    return losses


def digests(state: TrainState) -> Digests:
    """Name -> hash of each whole parameter of this rank's stages and of what the optimizer keeps of it."""
    found: Digests = {}
    assert state.optimizer is not None
    for fqn, parameter in state.trained.named_parameters().items():
        for entry, held in {"": parameter.detach(), **state.optimizer.state[parameter]}.items():
            tensor = state.trained.backend.to_canonical(fqn, held) if held.dim() else held
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(own_part(tensor, whole), tensor.to_local() if hasattr(tensor, "to_local") else tensor)
            found[f"{fqn} {entry}"] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
    return found


def save_layouts(root: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, tuple[Digests, list[float]]]:
    """Trains, saves and goes on, on each layout."""
    seen = {}
    for name, fields in layouts.items():
        forget_meshes()
        state = new_state(fields)
        go_on(state, 2)
        save(root / name, state)
        seen[name] = digests(state), go_on(state, 3)
    return seen


def load_layouts(
    root: Path, sources: tuple[str, ...], layouts: dict[str, dict[str, Any]]
) -> dict[tuple[str, str], tuple[Digests, list[float]]]:
    """Loads every checkpoint into one run on each layout."""
    seen = {}
    for name, fields in layouts.items():
        forget_meshes()
        state = new_state(fields)
        for source in sources:
            load(root / source, state)
            seen[source, name] = digests(state), go_on(state, 3) if source in FOLLOWED else []
    return seen


def on_all_sizes(layouts: dict[str, tuple[int, dict[str, Any]]], function: Any, *args: Any) -> dict[Any, Any]:
    """Calls a function with the layouts of each world size; what the stages of a layout hold is put together."""
    seen: dict[Any, tuple[Digests, list[float]]] = {}
    for size in sorted({size for size, _ in layouts.values()}):
        own = {name: fields for name, (ranks, fields) in layouts.items() if ranks == size}
        for run in run_ranks(size, function, *args, own, timeout_s=TIMEOUT_S):
            for key, (held, losses) in run.items():
                before, _ = seen.setdefault(key, ({}, losses))
                assert all(before.get(name, digest) == digest for name, digest in held.items())
                before.update(held)
    return seen


def check(root: Path, saved_on: dict[str, Any], loaded_on: dict[str, Any]) -> None:
    """Every checkpoint of one group of layouts loads on every layout of the other."""
    saved = on_all_sizes(saved_on, save_layouts, root)
    loaded = on_all_sizes(loaded_on, load_layouts, root, tuple(saved_on))
    assert len(loaded) == len(saved_on) * len(loaded_on)
    for (source, target), (held, losses) in loaded.items():
        assert held == saved[source][0], (source, target)
        assert not losses or difference(losses, saved[source][1]) < 1e-12, (source, target)


def test_a_few_mixes_of_axes_load_each_other_s_checkpoints(tmp_path: Path) -> None:
    few = {name: LAYOUTS[name] for name in ("none", "cp 2, ring", "ep 2", "pp 2, zero bubble v")}
    check(tmp_path, few, few)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_mix_of_axes_loads_the_checkpoints_of_every_other(tmp_path: Path) -> None:
    assert MoeConfig(**MODEL).balance_rate
    check(tmp_path, LAYOUTS, LAYOUTS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_meshes_of_three_and_four_dimensions_load_each_other_s_checkpoints_and_those_of_one_process(
    tmp_path: Path,
) -> None:
    both = {"none": LAYOUTS["none"], **LARGE}
    check(tmp_path, both, both)
