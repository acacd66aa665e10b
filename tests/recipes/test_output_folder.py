"""What a run finds in its output folder: another run, another model, other settings of the optimizer."""

import fcntl
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint import read_manifest
from models.llama import LlamaConfig
from recipes.folder_lock import LOCK_NAME
from recipes.recipe import Recipe, TrainingConfig
from recipes.train import train
from tests.ranks import run_ranks
from tests.recipes.small_recipe import MODEL, small_recipe


def refusal(recipe: Recipe) -> str:
    with pytest.raises(ValueError) as caught:
        train(recipe)
    return str(caught.value)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Recipe]:
    recipe = small_recipe(tmp_path, training={"stop_at": 2})
    run_ranks(1, train_and_forget, recipe)
    yield recipe


def train_and_forget(recipe: Recipe) -> None:
    train(recipe)


def test_a_second_run_in_the_same_folder_is_refused_on_every_rank(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    folder = Path(recipe.output.folder)
    folder.mkdir()
    with (folder / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 7 on elsewhere")
        file.flush()
        for message in run_ranks(2, refusal, recipe):
            assert "another run is writing to" in message
            assert "(process 7 on elsewhere)" in message
    assert sorted(each.name for each in folder.iterdir()) == [LOCK_NAME]


@pytest.mark.parametrize(
    "other",
    [
        replace(MODEL, num_heads=2, num_kv_heads=1),
        replace(MODEL, rope_theta=77.0),
        replace(MODEL, norm_eps=0.1),
    ],
)
def test_a_model_of_the_same_shapes_that_computes_something_else_is_refused(
    started: Recipe, other: LlamaConfig
) -> None:
    resumed = replace(started, model=other)
    folder = str(Path(started.output.folder).parent / "other")
    tuned = replace(
        started,
        model=other,
        training=replace(started.training, init_from=started.output.folder),
        output=replace(started.output, folder=folder),
    )
    for recipe in (resumed, tuned):
        (message,) = run_ranks(1, refusal, recipe)
        assert "the model is another one (saved -> now): model." in message


def test_how_a_model_was_initialized_does_not_matter_once_it_is_trained(started: Recipe) -> None:
    run_ranks(1, train_and_forget, replace(started, model=replace(MODEL, init_std=0.5), training=full(started)))


def full(recipe: Recipe) -> TrainingConfig:
    return replace(recipe.training, stop_at=3)


def test_settings_of_the_optimizer_that_change_on_resume_apply_with_a_warning(started: Recipe) -> None:
    recipe = replace(started, optimizer=replace(started.optimizer, weight_decay=0.5, eps=1e-3), training=full(started))
    (messages,) = run_ranks(1, warnings_of_training, recipe)
    assert any("the optimizer changes on resume" in each and "eps 1e-08 -> 0.001" in each for each in messages)
    newest = sorted((Path(recipe.output.folder) / "checkpoints").iterdir())[-1]
    optimizer = read_manifest(newest).header.optimizer
    assert optimizer is not None
    assert "0.5" in str(optimizer["groups"])
    assert "0.001" in str(optimizer["groups"])


def warnings_of_training(recipe: Recipe) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(recipe)
    return [str(each.message) for each in caught]
