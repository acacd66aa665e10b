"""A resumed run is the uninterrupted one: same losses, same samples, on the same mesh and on others."""

import dataclasses
import json
from collections import defaultdict
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest

import recipes.train
from parallel import ParallelConfig
from recipes.data import DataStream, load_dataset
from recipes.recipe import Recipe
from tests.ranks import run_ranks
from tests.recipes.small_recipe import STEPS, moved, small_recipe

# Six steps are an epoch, the last one of fewer samples: a run stopped there goes on with the next epoch.
BORDER = 6
WITHIN = 4

Samples = dict[int, list[int]]
"""Step -> ids of the samples that all ranks together trained on, sorted."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left behind."""

    losses: list[float]
    samples: Samples


def _train_and_record(recipe: Recipe) -> dict[int, dict[tuple[int, int], list[int]]]:
    """Step -> (data-parallel rank, size of that view) -> ids of its samples, as this rank got them."""
    streams = []

    class Recorder(DataStream):
        def next_step(self):  # type: ignore[no-untyped-def]
            batches = super().next_step()
            taken.append(list(self.last_sample_ids))
            return batches

    taken: list[list[int]] = []

    def stream(*args, **kwargs):  # type: ignore[no-untyped-def]
        streams.append((kwargs["dp_rank"], kwargs["dp_degree"]))
        return Recorder(*args, **kwargs)

    with mock.patch.object(recipes.train, "DataStream", stream):
        summary = recipes.train.train(recipe)
    return {summary.first_step + 1 + index: {streams[0]: ids} for index, ids in enumerate(taken)}


def _run(recipe: Recipe, world_size: int) -> Run:
    by_step: dict[int, dict[tuple[int, int], list[int]]] = defaultdict(dict)
    for of_rank in run_ranks(world_size, _train_and_record, recipe):
        for step, shares in of_rank.items():
            for where, ids in shares.items():
                # Ranks that split a sample got the same ones.
                assert by_step[step].setdefault(where, ids) == ids
    records = [json.loads(line) for line in recipe.output.metrics.read_text().splitlines()]
    return Run(
        losses=[each["loss"] for each in records if each["kind"] == "step"],
        samples={step: sorted(chain.from_iterable(shares.values())) for step, shares in by_step.items()},
    )


@pytest.fixture(scope="module")
def float64(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return small_recipe(tmp_path_factory.mktemp("float64"), training={"stored_dtype": "float64"})


@pytest.fixture(scope="module")
def uninterrupted(float64: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    output = dataclasses.replace(float64.output, folder=str(tmp_path_factory.mktemp("whole")))
    return _run(dataclasses.replace(float64, output=output), 2)


@pytest.fixture(scope="module", params=[WITHIN, BORDER], ids=["within an epoch", "between epochs"])
def stopped(
    request: pytest.FixtureRequest, float64: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recipe, int]:
    """A run on full_shard 2 that stopped, and where."""
    recipe = dataclasses.replace(
        float64,
        training=dataclasses.replace(float64.training, stop_at=request.param),
        output=dataclasses.replace(float64.output, folder=str(tmp_path_factory.mktemp("stopped"))),
    )
    _run(recipe, 2)
    return dataclasses.replace(recipe, training=float64.training), request.param


def test_each_sample_comes_once_an_epoch(float64: Recipe, uninterrupted: Run) -> None:
    num_samples = load_dataset(float64.data).train.num_samples
    assert num_samples == 33
    for epoch in range(STEPS // BORDER):
        steps = range(epoch * BORDER + 1, (epoch + 1) * BORDER + 1)
        assert sorted(chain.from_iterable(uninterrupted.samples[step] for step in steps)) == list(range(num_samples))


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [({}, 2), ({"tp": 2}, 2), ({"data_parallel": "none"}, 1)],
    ids=["full_shard 2", "tp 2", "one process"],
)
def test_on_the_same_mesh_ten_further_steps_have_bitwise_the_losses_of_an_uninterrupted_run(
    parallel: dict[str, object], world_size: int, tmp_path: Path
) -> None:
    whole = small_recipe(tmp_path, parallel=parallel)
    expected = _run(whole, world_size)
    start = small_recipe(
        tmp_path, parallel=parallel, training={"stop_at": BORDER}, output={"folder": str(tmp_path / "2")}
    )
    first = _run(start, world_size)
    assert first.losses == expected.losses[:BORDER]
    second = _run(dataclasses.replace(start, training=whole.training), world_size)
    assert second.losses == expected.losses
    assert len(second.losses) - BORDER == 10
    assert {**first.samples, **second.samples} == expected.samples


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [
        (ParallelConfig(tp=2), 2),
        (ParallelConfig(data_parallel="none"), 1),
        (ParallelConfig(), 3),
        (ParallelConfig(dp_shard=2, tp=2), 4),
    ],
    ids=["tp 2", "one process", "full_shard 3", "full_shard 2 x tp 2"],
)
def test_on_another_mesh_losses_and_samples_are_those_of_an_uninterrupted_run(
    parallel: ParallelConfig, world_size: int, stopped: tuple[Recipe, int], uninterrupted: Run, tmp_path: Path
) -> None:
    recipe, stop = stopped
    run = _run(dataclasses.replace(moved(recipe, tmp_path / "out"), parallel=parallel), world_size)
    assert run.losses == pytest.approx(uninterrupted.losses, rel=1e-12, abs=0)
    assert run.samples == {step: ids for step, ids in uninterrupted.samples.items() if step > stop}


def test_a_run_that_has_ended_says_so_and_does_nothing_more(stopped: tuple[Recipe, int], tmp_path: Path) -> None:
    recipe, stop = stopped
    recipe = moved(recipe, tmp_path / "out")
    run = _run(dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, stop_at=stop)), 2)
    assert run.samples == {}
    assert len(run.losses) == stop


@pytest.mark.parametrize(("saved_on", "resumed_on"), [(2, 4), (4, 2)])
def test_another_number_of_data_parallel_ranks_goes_on_with_exactly_the_samples_that_are_next(
    saved_on: int, resumed_on: int, uninterrupted: Run, float64: Recipe, tmp_path: Path
) -> None:
    """None again and none left out, in whichever direction the number of ranks changes, and with the same losses."""
    recipe = dataclasses.replace(
        float64,
        parallel=ParallelConfig(),
        training=dataclasses.replace(float64.training, stop_at=WITHIN),
        output=dataclasses.replace(float64.output, folder=str(tmp_path / "out")),
    )
    first = _run(recipe, saved_on)
    second = _run(dataclasses.replace(recipe, training=float64.training), resumed_on)
    assert {**first.samples, **second.samples} == uninterrupted.samples
    assert min(second.samples) == WITHIN + 1
    assert second.losses == pytest.approx(uninterrupted.losses, rel=1e-12, abs=0)
