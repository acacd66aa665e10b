"""Recipes on pipeline stages: trained, resumed without them, evaluated, sampled; and what a failing stage leaves."""

import dataclasses
import json
import time
from pathlib import Path

import pytest

from parallel import ParallelConfig
from recipes.evaluate import EvaluateCommand, evaluate
from recipes.from_checkpoint import find_checkpoint
from recipes.generate import GenerateCommand, generate
from recipes.recipe import Recipe
from recipes.train import train
from tests.parallel.small_model import difference
from tests.ranks import run_ranks
from tests.recipes.small_recipe import moved, small_recipe
from tests.recipes.test_processes import Command

STAGES = ParallelConfig(pp=2, schedule="1f1b")
INTERLEAVED = ParallelConfig(pp=2, schedule="interleaved_1f1b")
ONE = ParallelConfig(data_parallel="none")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A float64 recipe after some steps on two stages; the sixth one has fewer samples."""
    recipe = small_recipe(
        tmp_path_factory.mktemp("trained"),
        training={"stored_dtype": "float64", "stop_at": 8},
        model={"num_layers": 4},
    )
    recipe = dataclasses.replace(recipe, parallel=STAGES)
    run_ranks(2, train, recipe)
    return recipe


def losses(recipe: Recipe) -> list[float]:
    lines = map(json.loads, recipe.output.metrics.read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line and "step_time_s" in line]


def test_a_run_on_stages_is_the_one_without_and_goes_on_without_them(trained: Recipe, tmp_path: Path) -> None:
    resumed = moved(trained, tmp_path / "resumed")
    whole = dataclasses.replace(trained.output, folder=str(tmp_path / "whole"))
    to_the_end = dataclasses.replace(trained.training, stop_at=12)
    for recipe, world_size in (
        (dataclasses.replace(resumed, training=to_the_end, parallel=ParallelConfig()), 2),
        (dataclasses.replace(trained, training=to_the_end, parallel=ONE, output=whole), 1),
    ):
        run_ranks(world_size, train, recipe)
    found, expected = losses(resumed), losses(dataclasses.replace(trained, output=whole))
    assert len(found) == len(expected) == 12
    assert difference(found, expected) < 1e-10


def text_of(command: GenerateCommand, recipe: Recipe) -> str:
    return "".join(generate(command, recipe))


@pytest.mark.parametrize("cache", [True, False])
def test_a_text_sampled_on_stages_is_that_of_one_process(trained: Recipe, cache: bool) -> None:
    texts = set()
    for world_size, layout in ((1, ONE), (2, STAGES), (2, INTERLEAVED)):
        command = GenerateCommand(
            checkpoint=str(trained.output.checkpoints), prompt="mesh ", num_tokens=20, cache=cache, parallel=layout
        )
        texts |= set(run_ranks(world_size, text_of, command, trained))
    assert len(texts) == 1


def test_an_evaluation_on_stages_is_that_of_one_process(trained: Recipe) -> None:
    checkpoint, found = find_checkpoint(str(trained.output.checkpoints)), []
    for world_size, layout in ((1, ONE), (2, STAGES)):
        command = EvaluateCommand(side="all", micro_batch=4, data=trained.data, parallel=layout)
        found += [each.loss_sum for each in run_ranks(world_size, evaluate, checkpoint, command, trained)]
    assert found == pytest.approx([found[0]] * 3, rel=1e-12)


def test_too_few_micro_batches_are_refused_before_a_rank_starts(trained: Recipe) -> None:
    recipe = dataclasses.replace(trained, training=dataclasses.replace(trained.training, micro_batch=6))
    with pytest.raises(ValueError, match=r"cannot run 1 micro-batches .* nearest legal numbers: \[2, 3, 4, 5\]"):
        recipe.check(2)


def test_an_exception_on_one_stage_ends_all_and_is_what_is_shown(tmp_path: Path) -> None:
    start_s = time.monotonic()
    code, out, err = Command(tmp_path, "tests.recipes.failing_stage").finish()
    assert code != 0
    assert "Misfortune: of the second stage" in err, err
    # Most of it is the start of three processes.
    assert time.monotonic() - start_s < 45, out
