"""A recipe trains, resumes, is evaluated and sampled under every baseline backend, with one field changed."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallel import CollectiveCounter, ParallelConfig, Precision
from recipes.evaluate import EvaluateCommand, Evaluation, evaluate
from recipes.from_checkpoint import find_checkpoint, load_model
from recipes.generate import GenerateCommand, generate
from recipes.recipe import Recipe
from recipes.train import train
from tests.ranks import run_ranks
from tests.recipes.small_recipe import small_recipe

STOP, END = 2, 4
BACKENDS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"data_parallel": "ddp"}),
    "zero1": (2, {"data_parallel": "zero1"}),
    "no_shard": (2, {"strategy": "no_shard"}),
    "fsdp1": (2, {"data_parallel": "fsdp1"}),
    "dp": (1, {"data_parallel": "dp"}),
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """What the commands gave, as one rank saw it."""

    evaluation: Evaluation
    text: str
    num_collectives: int


def use(recipe: Recipe) -> Seen:
    """Trains to a checkpoint, goes on from it, evaluates and samples."""
    until = partial(dataclasses.replace, recipe.training)
    train(dataclasses.replace(recipe, training=until(stop_at=STOP)))
    train(dataclasses.replace(recipe, training=until(stop_at=END)))
    checkpoint, parallel = find_checkpoint(recipe.output.folder), recipe.parallel
    with CollectiveCounter(load_model(checkpoint, recipe, parallel).mesh) as counter:
        evaluation = evaluate(checkpoint, EvaluateCommand(data=recipe.data, parallel=parallel, side="all"), recipe)
    sample = GenerateCommand(checkpoint=checkpoint, parallel=parallel, prompt="mesh ", num_tokens=4, temperature=0.0)
    return Seen(evaluation, "".join(generate(sample, recipe)), len(counter.records))


def losses(recipe: Recipe) -> list[float]:
    records = [json.loads(line) for line in recipe.output.metrics.read_text().splitlines()]
    return [each["loss"] for each in records if each["kind"] == "step"]


def recipe_of(folder: Path, fields: dict[str, Any]) -> Recipe:
    """With accumulation, clipping and activation checkpointing."""
    parallel = {"activation_checkpointing": "full", **fields}
    training = {"stored_dtype": "float64", "micro_batch": 1, "max_gradient_norm": 0.5}
    return small_recipe(folder, parallel=parallel, training=training)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Seen]:
    recipe = recipe_of(tmp_path_factory.mktemp("none"), {"data_parallel": "none"})
    (seen,) = run_ranks(1, use, recipe)
    return losses(recipe), seen


@pytest.mark.parametrize("name", BACKENDS)
def test_a_recipe_gives_the_numbers_and_the_text_of_one_process(
    name: str, reference: tuple[list[float], Seen], tmp_path: Path
) -> None:
    num_ranks, fields = BACKENDS[name]
    recipe = recipe_of(tmp_path, fields)
    for seen in run_ranks(num_ranks, use, recipe):
        assert losses(recipe) == pytest.approx(reference[0], rel=1e-12)
        assert seen.evaluation.loss_sum == pytest.approx(reference[1].evaluation.loss_sum, rel=1e-12)
        assert seen.evaluation.num_tokens == reference[1].evaluation.num_tokens
        assert seen.text == reference[1].text
        assert (seen.num_collectives > 0) == (num_ranks > 1)


@pytest.mark.parametrize("name", BACKENDS)
def test_bf16_compute_trains_under_each(name: str, tmp_path: Path) -> None:
    num_ranks, fields = BACKENDS[name]
    bf16 = Precision(compute="bfloat16", reduce="float32")
    plain = small_recipe(tmp_path, parallel=fields, training={"stop_at": 1})
    narrow = dataclasses.replace(
        plain,
        parallel=dataclasses.replace(ParallelConfig(**fields), precision=bf16),
        output=dataclasses.replace(plain.output, folder=str(tmp_path / "bf16")),
    )
    for recipe in (plain, narrow):
        run_ranks(num_ranks, train, recipe)
    assert losses(narrow) == pytest.approx(losses(plain), rel=2e-3)
    assert losses(narrow) != losses(plain)
