"""A run goes on from a checkpoint of any layout on any other: the same tensors bit for bit, and the same losses."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint import TrainState, load, save
from models.llama.config import LlamaConfig
from parallel import Batch, Mesh, ParallelConfig, Trained
from tests.checkpoint.states import forget_meshes
from tests.parallel.small_model import adamw, build, difference
from tests.ranks import run_ranks

# Sizes that the degrees do not divide, but where tensor parallelism needs it.
MODEL = LlamaConfig(
    num_layers=1, width=24, num_heads=2, num_kv_heads=2, feed_forward_width=20, vocab_size=37, max_sequence_length=8
)
NUM_STEPS = 5
TIMEOUT_S = 300.0
_FSDP1: dict[str, Any] = {"data_parallel": "fsdp1"}
_HYBRID: dict[str, Any] = {"strategy": "hybrid_shard", "dp_replicate": 2}
_HYBRID_ZERO2: dict[str, Any] = {"strategy": "hybrid_shard_zero2", "dp_replicate": 2}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (1, {"data_parallel": "none"}),
    "ddp 2": (2, {"data_parallel": "ddp"}),
    "zero1 2": (2, {"data_parallel": "zero1"}),
    "fsdp1 shard_grad_op 2": (2, {**_FSDP1, "strategy": "shard_grad_op"}),
    "fsdp1 no_shard 2": (2, {**_FSDP1, "strategy": "no_shard"}),
    "fsdp2 full_shard 2": (2, {}),
    "fsdp2 shard_grad_op 2": (2, {"strategy": "shard_grad_op"}),
    "fsdp2 no_shard 2": (2, {"strategy": "no_shard"}),
    "tp 2": (2, {"tp": 2}),
    "fsdp1 full_shard 3": (3, _FSDP1),
    "fsdp1 hybrid_shard 2 x 2": (4, {**_FSDP1, **_HYBRID}),
    "fsdp1 hybrid_shard_zero2 2 x 2": (4, {**_FSDP1, **_HYBRID_ZERO2}),
    "fsdp1 full_shard 2 x tp 2": (4, {**_FSDP1, "tp": 2}),
    "fsdp2 hybrid_shard 2 x 2": (4, _HYBRID),
    "fsdp2 hybrid_shard_zero2 2 x 2": (4, _HYBRID_ZERO2),
    "fsdp2 full_shard 2 x tp 2": (4, {"tp": 2}),
}
# From these a run goes on in the quick test; it holds what it loads bit for bit from all.
FOLLOWED = ("none", "fsdp1 full_shard 3", "fsdp2 full_shard 2 x tp 2")
WORLD_SIZES = sorted({size for size, _ in LAYOUTS.values()})


class Seen(NamedTuple):
    """What a run holds, and how it goes on, where it does."""

    digests: dict[str, str]
    losses: list[float]


def batch(mesh: Mesh, step: int) -> list[Batch]:
    """This rank's part of the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, MODEL.vocab_size, (12, 9), generator=generator)
    mine = tokens.chunk(mesh.degree("dp"))[mesh.coordinate("dp")]
    return [Batch.from_tokens(mine[:, :-1], labels=mine[:, 1:])]


def new_state(fields: dict[str, Any]) -> TrainState:
    """A run that has done nothing."""
    trained = build(ParallelConfig(**fields), MODEL)
    return TrainState(trained=trained, optimizer=trained.build_optimizer(adamw))


def go_on(state: TrainState) -> list[float]:
    """The losses of the next steps."""
    trained, losses = state.trained, []
    assert isinstance(trained, Trained)
    assert state.optimizer is not None
    for _ in range(NUM_STEPS):
        losses.append(trained.forward_backward(batch(trained.mesh, state.step)).loss)
        trained.clip_gradients(1.0)
        state.optimizer.step()
        state.step += 1
    return losses


def digests(state: TrainState) -> dict[str, str]:
    """Name -> hash of each whole parameter and of what the optimizer keeps of it."""
    found: dict[str, str] = {}
    for fqn, parameter in state.trained.named_parameters().items():
        assert state.optimizer is not None
        entries = {"": parameter.detach(), **state.optimizer.state[parameter]}
        for entry, held in entries.items():
            tensor: Tensor = state.trained.backend.to_canonical(fqn, held) if held.dim() else held
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[f"{fqn} {entry}"] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    return found


def save_layouts(root: Path, names: list[str]) -> dict[str, Seen]:
    """Trains, saves and goes on, on each layout."""
    seen = {}
    for name in names:
        forget_meshes()
        state = new_state(LAYOUTS[name][1])
        go_on(state)
        save(root / name, state)
        seen[name] = Seen(digests(state), go_on(state))
    return seen


def load_layouts(root: Path, names: list[str], followed: tuple[str, ...]) -> dict[tuple[str, str], Seen]:
    """Loads every checkpoint into one run on each layout, whose optimizer has not stepped before the first."""
    seen = {}
    for name in names:
        forget_meshes()
        state = new_state(LAYOUTS[name][1])
        for source in LAYOUTS:
            load(root / source, state)
            seen[source, name] = Seen(digests(state), go_on(state) if source in followed else [])
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("every-pair")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, Seen]:
    """What each layout held when it saved, and how it went on."""
    seen: dict[str, Seen] = {}
    for world_size in WORLD_SIZES:
        names = [name for name, (size, _) in LAYOUTS.items() if size == world_size]
        seen |= run_ranks(world_size, save_layouts, folder, names, timeout_s=TIMEOUT_S)[0]
    return seen


LONG = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("followed", "world_size"),
    [
        # Four ranks on two cores take their time.
        *(pytest.param(FOLLOWED, size, id=f"some losses-{size}") for size in WORLD_SIZES if size < 4),
        *(pytest.param(tuple(LAYOUTS), size, id=f"all losses-{size}", marks=LONG) for size in WORLD_SIZES),
    ],
)
def test_every_layout_goes_on_from_a_checkpoint_of_every_layout(
    folder: Path, saved: dict[str, Seen], followed: tuple[str, ...], world_size: int
) -> None:
    names = [name for name, (size, _) in LAYOUTS.items() if size == world_size]
    on_rank_0, *_ = run_ranks(world_size, load_layouts, folder, names, followed, timeout_s=TIMEOUT_S)
    assert len(on_rank_0) == len(LAYOUTS) * len(names)
    for (source, target), seen in on_rank_0.items():
        assert seen.digests == saved[source].digests, f"{source} -> {target}"
        if source in followed:
            assert difference(seen.losses, saved[source].losses) < 1e-12, f"{source} -> {target}"


def test_both_moments_of_every_parameter_are_among_what_is_compared(saved: dict[str, Seen]) -> None:
    kinds = {name.rpartition(" ")[2] for name in saved["none"].digests}
    assert kinds == {"", "step", "exp_avg", "exp_avg_sq"}
    assert len(saved["none"].digests) == 4 * 12
    assert all(seen.digests.keys() == saved["none"].digests.keys() for seen in saved.values())
    assert all(len(set(seen.losses)) == NUM_STEPS for seen in saved.values())
