"""Signals and failing file systems: what a run saves, where it stops, and that the same command goes on exactly."""

import dataclasses
import errno
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import recipes.train
from checkpoint import filesystem, latest
from recipes import optimizer_step
from recipes.recipe import Recipe
from recipes.run_log import TrainSummary
from tests.ranks import run_ranks
from tests.recipes.small_recipe import small_recipe

LAST = 6


def records(recipe: Recipe) -> list[dict[str, Any]]:
    """What must not depend on interruptions, step by step."""
    names = ("step", "epoch", "loss", "gradient_norm", "learning_rates", "num_tokens", "tokens_seen")
    lines = [json.loads(line) for line in recipe.output.metrics.read_text().splitlines()]
    return [{name: each[name] for name in names} for each in lines if each["kind"] == "step"]


def saved(recipe: Recipe) -> list[str]:
    return sorted(each.name for each in recipe.output.checkpoints.iterdir())


def train(recipe: Recipe) -> TrainSummary:
    return recipes.train.train(recipe)


def train_with_signal(recipe: Recipe, number: int, rank: int, step: int) -> TrainSummary:
    """Trains, and sends one rank a signal within a step."""

    def signalled(recipe: Recipe, state: Any, utilization: Any) -> Any:
        if dist.get_rank() == rank and state.step == step - 1:
            os.kill(os.getpid(), number)
        return optimizer_step.take_step(recipe, state, utilization)

    with mock.patch.object(recipes.train, "take_step", signalled):
        return recipes.train.train(recipe)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


def recipe_in(text: Path, folder: Path, **output: Any) -> Recipe:
    return small_recipe(text, training={"steps": LAST}, output={"folder": str(folder), **output})


@pytest.fixture(scope="module")
def uninterrupted(text: Path) -> list[dict[str, Any]]:
    recipe = recipe_in(text, text / "whole")
    run_ranks(2, train, recipe)
    return records(recipe)


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 0), (signal.SIGINT, 1)])
def test_a_signal_to_any_rank_stops_all_after_the_same_step_saved_and_the_run_goes_on_exactly(
    number: signal.Signals, rank: int, background: bool, text: Path, tmp_path: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    recipe = recipe_in(text, tmp_path, save_every=2, save_in_background=background)
    summaries = run_ranks(2, train_with_signal, recipe, number, rank, 3)
    assert [(each.last_step, each.stopped_by) for each in summaries] == [(3, number.name)] * 2
    assert saved(recipe) == ["step-00000002", "step-00000003"]
    summaries = run_ranks(2, train, recipe)
    assert [(each.first_step, each.last_step, each.stopped_by) for each in summaries] == [(3, LAST, None)] * 2
    assert records(recipe) == uninterrupted


def test_learning_rates_do_not_depend_on_the_number_of_ranks(
    text: Path, tmp_path: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    recipe = recipe_in(text, tmp_path)
    run_ranks(1, train, recipe)
    rates = [each["learning_rates"] for each in records(recipe)]
    assert rates == [each["learning_rates"] for each in uninterrupted]
    assert len({str(each) for each in rates}) == LAST


def test_a_signal_in_the_last_step_changes_nothing(text: Path, tmp_path: Path) -> None:
    recipe = recipe_in(text, tmp_path)
    summaries = run_ranks(2, train_with_signal, recipe, signal.SIGTERM, 1, LAST)
    assert [(each.last_step, each.stopped_by) for each in summaries] == [(LAST, None)] * 2
    assert saved(recipe) == [f"step-{LAST:08d}"]


def handlers_after_training(recipe: Recipe) -> bool:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    recipes.train.train(recipe)
    return before == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]


def test_signals_are_handled_as_before_once_training_has_ended(text: Path, tmp_path: Path) -> None:
    assert run_ranks(1, handlers_after_training, recipe_in(text, tmp_path)) == [True]


def train_on_a_full_disk(recipe: Recipe, step: int, times: int) -> tuple[str, list[str]]:
    """What training raised and warned of; the disk of rank 1 is full at the save of a step."""
    create_file, failures = filesystem.create, list[Path]()

    def create(path: Path) -> int:
        if dist.get_rank() == 1 and f"step-{step:08d}" in str(path) and len(failures) < times:
            failures.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return create_file(path)

    message = ""
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(filesystem, "create", create):
        warnings.simplefilter("always")
        try:
            recipes.train.train(recipe)
        except OSError as error:
            message = str(error)
    return message, [str(each.message) for each in caught if "No space" in str(each.message)]


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_a_save_that_fails_on_one_rank_ends_the_run_on_all(text: Path, tmp_path: Path, background: bool) -> None:
    recipe = recipe_in(text, tmp_path, save_every=2, save_in_background=background)
    outcomes = run_ranks(2, train_on_a_full_disk, recipe, 4, 1)
    assert outcomes[0] == outcomes[1]
    message, _ = outcomes[0]
    assert "could not save" in message
    assert "rank 1: [Errno 28] No space left on device" in message
    assert saved(recipe) == ["step-00000002"]
    # In the background it surfaces after the step that follows, in any case before the run saves again.
    assert 4 <= len(records(recipe)) <= 5


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_a_save_that_fails_is_a_warning_where_the_recipe_says_so(text: Path, tmp_path: Path, background: bool) -> None:
    recipe = recipe_in(text, tmp_path, save_every=2, save_in_background=background, on_failed_save="continue")
    for message, warned in run_ranks(2, train_on_a_full_disk, recipe, 4, 1):
        assert message == ""
        assert len(warned) == 1
        assert warned[0].endswith("the run continues without this checkpoint")
    assert saved(recipe) == ["step-00000002", f"step-{LAST:08d}"]


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_the_last_save_of_a_run_must_succeed(text: Path, tmp_path: Path, background: bool) -> None:
    recipe = recipe_in(text, tmp_path, save_every=2, save_in_background=background, on_failed_save="continue")
    for message, _ in run_ranks(2, train_on_a_full_disk, recipe, LAST, 1):
        assert "No space left on device" in message
    assert latest(recipe.output.checkpoints) == recipe.output.checkpoints / "step-00000004"


def test_a_run_whose_folder_another_one_has_taken_stops_before_it_saves(text: Path, tmp_path: Path) -> None:
    recipe = recipe_in(text, tmp_path, save_every=2)
    for message in run_ranks(2, message_of_taken_folder, recipe):
        assert "another run (process 7 on elsewhere) has taken" in message
    assert list(recipe.output.checkpoints.iterdir()) == []


def message_of_taken_folder(recipe: Recipe) -> str:

    def taken(*args: Any) -> Any:
        # As a file system does that does not lock over nodes.
        (Path(recipe.output.folder) / ".lock").write_text("process 7 on elsewhere")
        return optimizer_step.take_step(*args)

    with mock.patch.object(recipes.train, "take_step", taken), pytest.raises(OSError) as raised:
        recipes.train.train(recipe)
    return str(raised.value)


def test_unknown_ways_to_fail_are_refused(tmp_path: Path) -> None:
    output = small_recipe(tmp_path).output
    with pytest.raises(ValueError, match="unknown on_failed_save 'ignore'; legal: stop, continue"):
        dataclasses.replace(output, on_failed_save="ignore")  # type: ignore[arg-type]  # what a user may write
