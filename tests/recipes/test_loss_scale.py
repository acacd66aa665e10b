"""Runs in float16 show the scale of the loss and its skipped steps, and go on with it."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from parallel import LossScaling, ParallelConfig, Precision
from parallel.loss_scale import LossScale
from recipes.messages import describe
from recipes.metrics import StepMetrics
from recipes.recipe import Recipe
from recipes.train import train
from tests.ranks import run_ranks
from tests.recipes.small_recipe import small_recipe

# The first steps overflow, and then the scale grows every third step.
SCALING = LossScaling(initial=2.0**40, backoff=2.0**-8, growth_interval=3)
LAYOUT = ParallelConfig(precision=Precision(compute="float16", reduce="float32", loss_scaling=SCALING))


def steps(recipe: Recipe) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in recipe.output.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def test_skipped_steps_take_data_and_a_resumed_run_is_bitwise_the_same(tmp_path: Path) -> None:
    recipe = dataclasses.replace(small_recipe(tmp_path, training={"steps": 9}), parallel=LAYOUT)
    run_ranks(2, train, recipe)
    whole = steps(recipe)
    skipped = [line["step"] for line in whole if line["skipped"]]
    assert skipped[:2] == [1, 2]
    assert [line["num_skipped"] for line in whole] == [sum(each <= line["step"] for each in skipped) for line in whole]
    assert whole[0]["loss_scale"] == 2.0**32
    assert any(after["loss_scale"] == 2 * before["loss_scale"] for before, after in itertools.pairwise(whole))
    # Other samples each time, also after a skipped step.
    assert all(line["tokens_seen"] > 0 for line in whole)
    assert len({line["loss"] for line in whole}) == len(whole)
    for output, stop_at in (("again", 4), ("again", None)):
        again = dataclasses.replace(
            recipe,
            output=dataclasses.replace(recipe.output, folder=str(tmp_path / output)),
            training=dataclasses.replace(recipe.training, stop_at=stop_at),
        )
        run_ranks(2, train, again)
    same = ("loss", "loss_scale", "num_skipped", "skipped", "tokens_seen")
    assert [[line[name] for name in same] for line in steps(again)] == [[line[name] for name in same] for line in whole]


def test_the_line_of_a_step_shows_scale_and_skipped_steps() -> None:
    metrics = StepMetrics(
        step=3,
        total_steps=9,
        epoch=0,
        loss=2.0,
        gradient_norm=1.0,
        learning_rates={"matrices": 1e-3},
        num_tokens=10,
        tokens_seen=30,
        step_time_s=0.1,
        peak_bytes=0,
        loss_scale=32768.0,
        num_skipped=2,
    )
    assert "  scale 32768, 2 skipped  " in metrics.line()
    assert metrics.scalars()["train/loss_scale"] == 32768.0
    assert "scale" not in dataclasses.replace(metrics, loss_scale=None, num_skipped=None).line()


def test_a_run_that_diverged_says_so_in_one_line() -> None:
    scale = LossScale(LossScaling(initial=1.0))
    with pytest.raises(FloatingPointError) as failure:
        scale.update(overflowed=True)
    assert describe(failure.value).startswith("gradients are not finite although the loss scale is down at 1")
