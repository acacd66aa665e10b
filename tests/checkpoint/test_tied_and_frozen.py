"""A tied weight is stored once and comes back tied, a frozen parameter comes back without state, on any layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint import TrainState, load, read_manifest, save
from parallel import ParallelConfig
from tests.checkpoint.states import forget_meshes
from tests.checkpoint.test_every_pair import LAYOUTS, MODEL, Seen, digests, go_on
from tests.parallel.small_model import adamw, build
from tests.ranks import run_ranks

TIED = replace(MODEL, tied_embeddings=True)
FROZEN = "blocks.0.attention.q_proj.weight"
SAVED_ON = "fsdp2 full_shard 2"
LOADED_ON = ("ddp 2", "zero1 2", "fsdp1 no_shard 2", "tp 2", SAVED_ON)


def new_state(layout: str) -> TrainState:
    trained = build(ParallelConfig(**LAYOUTS[layout][1]), TIED, frozen=[FROZEN])

    def factory(named: dict[str, Any]) -> Any:
        return adamw({fqn: each for fqn, each in named.items() if each.requires_grad})

    return TrainState(trained=trained, optimizer=trained.build_optimizer(factory))


def save_one(folder: Path) -> Seen:
    forget_meshes()
    state = new_state(SAVED_ON)
    go_on(state)
    save(folder, state)
    return Seen(digests(state), go_on(state))


def load_on(folder: Path, layout: str) -> Seen:
    forget_meshes()
    state = new_state(layout)
    load(folder, state)
    return Seen(digests(state), go_on(state))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    folder = tmp_path_factory.mktemp("tied")
    return folder, run_ranks(2, save_one, folder)[0]


def test_one_of_the_names_of_a_tied_weight_is_stored_and_no_state_of_a_frozen_one(saved: tuple[Path, Seen]) -> None:
    names = set(read_manifest(next(saved[0].iterdir())).tensors)
    assert "model.embed.weight" in names and not any("head" in name for name in names)
    assert f"model.{FROZEN}" in names and not any(name.startswith(f"optimizer.{FROZEN}") for name in names)


@pytest.mark.parametrize("layout", LOADED_ON)
def test_training_goes_on_from_tied_and_frozen_parameters_of_another_layout(
    layout: str, saved: tuple[Path, Seen]
) -> None:
    folder, before = saved
    after = run_ranks(LAYOUTS[layout][0], load_on, folder, layout)[0]
    # Losses would differ after a step if only one of the tied ones had been filled, or the two had come apart.
    assert after.digests == before.digests
    assert after.losses == pytest.approx(before.losses, rel=1e-12, abs=0)
