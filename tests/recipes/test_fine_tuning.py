"""A run that starts from the weights of another: these alone, on any mesh, with data and schedule of its own."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint import latest, read_manifest
from parallel import ParallelConfig
from recipes.evaluate import EvaluateCommand, Evaluation, evaluate
from recipes.from_checkpoint import find_checkpoint
from recipes.recipe import Recipe
from recipes.train import train
from tests.ranks import run_ranks
from tests.recipes.data_stores import write_lines
from tests.recipes.small_recipe import small_recipe

ANSWERS = ("view", "rank 1", "no")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A float64 recipe after a few steps on two ranks of fully_shard."""
    recipe = small_recipe(
        tmp_path_factory.mktemp("base"), training={"stored_dtype": "float64", "stop_at": 8}, optimizer={"lr": 3e-2}
    )
    run_ranks(2, train, recipe)
    return recipe


def _tuned(base: Recipe, folder: Path, **training: Any) -> Recipe:
    """Fine-tunes on chats, all of which are one step."""
    lines = [
        {"messages": [{"role": "user", "content": "axis?"}, {"role": "assistant", "content": answer}]}
        for answer in ANSWERS
    ]
    source = write_lines(folder / "chat.jsonl", lines)
    values: dict[str, Any] = {
        "steps": 3,
        "global_batch": 8,
        "init_from": base.output.folder,
        "stop_at": None,
    } | training
    return dataclasses.replace(
        base,
        name="tuned",
        data=dataclasses.replace(base.data, source=source, record="chat", held_out_fraction=0.0, sequence_length=64),
        optimizer=dataclasses.replace(base.optimizer, lr=2e-3),
        training=dataclasses.replace(base.training, **values),
        output=dataclasses.replace(base.output, folder=str(folder / "tuned")),
    )


def _steps(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recipe.output.metrics.read_text().splitlines()]


def _measured(base: Recipe, tuned: Recipe) -> Evaluation:
    command = EvaluateCommand(data=tuned.data)
    (found,) = run_ranks(1, evaluate, find_checkpoint(base.output.folder), command, base)
    evaluation: Evaluation = found
    return evaluation


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tp=2)], ids=["full_shard 2", "tp 2"])
def test_the_first_step_sees_the_weights_of_the_other_run_and_all_else_is_fresh(
    parallel: ParallelConfig, base: Recipe, tmp_path: Path
) -> None:
    tuned = dataclasses.replace(_tuned(base, tmp_path), parallel=parallel)
    before = _measured(base, tuned)
    run_ranks(2, train, tuned)
    first, second, third = _steps(tuned)
    assert first["loss"] == pytest.approx(before.nats_per_token, rel=1e-12)
    # Prompts are masked: learned is what the assistant says, and the end of it.
    assert first["num_tokens"] == sum(len(answer) + 1 for answer in ANSWERS)
    assert [each["tokens_seen"] for each in (first, second, third)] == [1 * 15, 2 * 15, 3 * 15]
    assert [(each["step"], each["epoch"]) for each in (first, second, third)] == [(1, 0), (2, 1), (3, 2)]
    # The warm-up of two steps begins anew.
    assert [each["learning_rates"]["matrices"] for each in (first, second)] == [1e-3, 2e-3]
    assert third["loss"] < second["loss"] < first["loss"]
    found = latest(tuned.output.checkpoints)
    assert found
    header = read_manifest(found).header
    assert (header.step, header.recipe["name"]) == (3, "tuned")


def test_a_run_that_has_a_checkpoint_goes_on_from_its_own(base: Recipe, tmp_path: Path) -> None:
    tuned = _tuned(base, tmp_path)
    run_ranks(1, train, tuned)
    whole = [step["loss"] for step in _steps(tuned)]
    again = _tuned(base, tmp_path, stop_at=2)
    again = dataclasses.replace(again, output=dataclasses.replace(again.output, folder=str(tmp_path / "again")))
    run_ranks(1, train, again)
    gone = dataclasses.replace(
        again, training=dataclasses.replace(again.training, stop_at=None, init_from=str(tmp_path / "gone"))
    )
    run_ranks(1, train, gone)
    assert [step["loss"] for step in _steps(gone)] == pytest.approx(whole, rel=1e-12)


def _refused(recipe: Recipe) -> str:
    with pytest.raises(ValueError) as refusal:
        train(recipe)
    return str(refusal.value)


def test_weights_that_are_not_there_or_of_another_model_are_refused(base: Recipe, tmp_path: Path) -> None:
    tuned = _tuned(base, tmp_path)
    missing = _tuned(base, tmp_path, init_from=str(tmp_path / "none"))
    other = dataclasses.replace(tuned, model=dataclasses.replace(tuned.model, width=64))  # type: ignore[call-arg]
    narrow = _tuned(base, tmp_path, stored_dtype="float32")
    for recipe, message in (
        (missing, f"there is no checkpoint: '{tmp_path}/none' is not a folder"),
        (other, "the model is another one (saved -> now): model.width 32 -> 64; name another"),
        (narrow, "training.stored_dtype float64 -> float32"),
    ):
        first, second = run_ranks(2, _refused, recipe)
        assert message in first
        assert "\n" not in first
        assert second == first
    with pytest.raises(ValueError, match="init_from is empty"):
        _tuned(base, tmp_path, init_from=" ")
