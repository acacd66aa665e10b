"""Runs that train adapters save them alone if asked, go on exactly, and are used and exported like any other."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint import latest, read_manifest
from checkpoint.boxes import Box, whole
from checkpoint.manifest import Header
from checkpoint.offline import write_checkpoint
from checkpoint.sources import CheckpointSource
from models.layers.lora import LoraConfig, is_of_adapter
from parallel import ParallelConfig
from recipes.adapters import AdapterBase, base_path, find_base
from recipes.checkpoints.convert import ExportHf
from recipes.command import parse_train
from recipes.evaluate import EvaluateCommand, evaluate
from recipes.export import MergedSource, export_hub, model_source
from recipes.from_checkpoint import find_checkpoint, recipe_of
from recipes.generate import GenerateCommand, generate
from recipes.recipe import Recipe
from recipes.train import train
from tests.ranks import run_ranks
from tests.recipes.small_recipe import small_recipe

LORA = LoraConfig(rank=4, targets=("blocks.*.attention.*_proj", "blocks.*.feed_forward.down_proj"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A float64 recipe after a few steps on two ranks of fully_shard."""
    recipe = small_recipe(
        tmp_path_factory.mktemp("base"), training={"stored_dtype": "float64", "stop_at": 6}, optimizer={"lr": 3e-2}
    )
    run_ranks(2, train, recipe)
    return recipe


@pytest.fixture(scope="module")
def tuned(base: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Eight steps of adapters on that base, saved alone."""
    recipe = adapting(base, tmp_path_factory.mktemp("tuned") / "out")
    run_ranks(2, train, recipe)
    return recipe


def adapting(base: Recipe, folder: Path, *, only: bool = True, **training: Any) -> Recipe:
    values: dict[str, Any] = {"steps": 8, "init_from": base.output.folder, "stop_at": None, "seed": 5} | training
    return dataclasses.replace(
        base,
        lora=LORA,
        training=dataclasses.replace(base.training, **values),
        output=dataclasses.replace(base.output, folder=str(folder), adapters_only=only),
    )


def plain(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, lora=LoraConfig())


def losses(recipe: Recipe) -> list[float]:
    lines = [json.loads(line) for line in recipe.output.metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def saved(recipe: Recipe) -> Path:
    found = latest(recipe.output.checkpoints)
    assert found
    return found


def nats(path: str | Path, recipe: Recipe, parallel: ParallelConfig | None = None) -> float:
    command = EvaluateCommand(data=recipe.data, parallel=parallel or ParallelConfig())
    measured: float = run_ranks(2, evaluate, str(path), command, recipe)[0].nats_per_token
    return measured


def test_a_checkpoint_of_adapters_alone_holds_them_their_optimizer_state_and_the_name_of_the_base(
    base: Recipe, tuned: Recipe
) -> None:
    manifest = read_manifest(saved(tuned))
    names = [name for name in manifest.tensors if not name.startswith("rng.")]
    assert names
    assert all(is_of_adapter(name) for name in names)
    assert manifest.header.stateful["base"]["path"] == str(saved(base).absolute())
    assert sum(path.stat().st_size for path in saved(tuned).iterdir()) < 0.6 * sum(
        path.stat().st_size for path in saved(base).iterdir()
    )


def test_the_first_loss_is_that_of_the_base_and_later_ones_are_less(base: Recipe, tuned: Recipe) -> None:
    assert losses(tuned)[-1] < losses(tuned)[0]
    without = plain(adapting(base, Path(tuned.output.folder).parent / "no adapters", only=False, stop_at=1))
    run_ranks(2, train, without)
    assert losses(without) == pytest.approx(losses(tuned)[:1], rel=1e-13)


@pytest.mark.parametrize("only", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["adapters alone", "all"])
def test_a_run_goes_on_exactly_on_another_layout_too(base: Recipe, tuned: Recipe, only: bool, tmp_path: Path) -> None:
    stopped = adapting(base, tmp_path / "out", only=only, stop_at=3)
    run_ranks(2, train, stopped)
    gone_on = dataclasses.replace(adapting(base, tmp_path / "out", only=only), parallel=ParallelConfig(tp=2))
    run_ranks(2, train, gone_on)
    assert losses(gone_on) == pytest.approx(losses(tuned), rel=1e-12)


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2)], ids=["tp 2"])
def test_evaluation_and_generation_find_the_base(tuned: Recipe, parallel: ParallelConfig) -> None:
    path = find_checkpoint(tuned.output.folder)
    recipe = recipe_of(path)
    assert recipe.lora == LORA
    assert nats(path, recipe, parallel) < losses(tuned)[0]
    command = GenerateCommand(checkpoint=path, prompt="mesh", num_tokens=6, temperature=3.0, seed=4, parallel=parallel)
    first, second = run_ranks(2, sample, command, recipe)
    assert first == second
    assert first


def sample(command: GenerateCommand, recipe: Recipe) -> str:
    return "".join(generate(command, recipe))


def test_an_exported_folder_has_the_adapters_merged(tuned: Recipe, tmp_path: Path) -> None:
    path = find_checkpoint(tuned.output.folder)
    ExportHf(checkpoint=path, folder=str(tmp_path / "hf")).run()
    # Folders are read in float32.
    assert nats(tmp_path / "hf", plain(recipe_of(path))) == pytest.approx(nats(path, recipe_of(path)), rel=1e-6)
    assert not any(map(is_of_adapter, model_source(path).tensors))


@pytest.mark.slow
def test_adapters_go_on_a_hugging_face_folder_and_are_merged_into_it(base: Recipe, tmp_path: Path) -> None:
    export_hub(saved(base), tmp_path / "hf")
    recipe = adapting(base, tmp_path / "out", init_from=str(tmp_path / "hf"), steps=2, stored_dtype="float32")
    run_ranks(2, train, recipe)
    path = find_checkpoint(recipe.output.folder)
    export_hub(path, tmp_path / "merged")
    assert nats(tmp_path / "merged", plain(recipe)) == pytest.approx(nats(path, recipe), rel=1e-6)


@pytest.mark.slow
def test_another_run_begins_from_adapters_and_keeps_their_base(base: Recipe, tuned: Recipe, tmp_path: Path) -> None:
    recipe = adapting(base, tmp_path / "out", init_from=tuned.output.folder, steps=2, seed=9)
    run_ranks(2, train, recipe)
    before = nats(find_checkpoint(tuned.output.folder), recipe)
    assert losses(recipe)[0] == pytest.approx(_first_loss_of(tuned, tmp_path / "again"), rel=1e-12)
    assert before < losses(tuned)[0]
    assert read_manifest(saved(recipe)).header.stateful["base"]["path"] == str(saved(base).absolute())


def _first_loss_of(tuned: Recipe, folder: Path) -> float:
    """The loss of the first batch by a run that exports and trains all."""
    export_hub(find_checkpoint(tuned.output.folder), folder / "hf")
    merged = dataclasses.replace(
        plain(tuned),
        training=dataclasses.replace(tuned.training, init_from=str(folder / "hf"), stop_at=1),
        output=dataclasses.replace(tuned.output, folder=str(folder / "out"), adapters_only=False),
    )
    run_ranks(2, train, merged)
    return losses(merged)[0]


def _refused(recipe: Recipe) -> str:
    with pytest.raises(ValueError) as refusal:
        train(recipe)
    return str(refusal.value)


def test_a_base_that_moved_is_found_where_it_is_named_and_another_one_is_refused(base: Recipe, tmp_path: Path) -> None:
    first = tmp_path / "base"
    shutil.copytree(base.output.folder, first)
    recipe = adapting(base, tmp_path / "out", init_from=str(first), stop_at=2)
    run_ranks(1, train, recipe)
    first_losses = losses(recipe)
    first.rename(tmp_path / "moved")
    [said] = run_ranks(1, _refused, adapting(base, tmp_path / "out", init_from=str(first)))
    assert "holds adapters alone, and their base is not where it was" in said
    other = dataclasses.replace(base, output=dataclasses.replace(base.output, folder=str(tmp_path / "other")))
    other = dataclasses.replace(other, training=dataclasses.replace(other.training, stop_at=2))
    run_ranks(1, train, other)
    [said] = run_ranks(1, _refused, adapting(base, tmp_path / "out", init_from=other.output.folder))
    assert re.search(r"base is not where it was: at .*base.*\(nothing\) and .*other.*\(another model\)", said)
    run_ranks(1, train, adapting(base, tmp_path / "out", init_from=str(tmp_path / "moved"), stop_at=3))
    assert losses(recipe)[:2] == first_losses


def test_other_adapters_than_a_run_has_are_refused_by_field(base: Recipe, tuned: Recipe, tmp_path: Path) -> None:
    shutil.copytree(tuned.output.folder, tmp_path / "out")
    other = dataclasses.replace(adapting(base, tmp_path / "out"), lora=dataclasses.replace(LORA, alpha=8.0))
    [said] = run_ranks(1, _refused, other)
    assert "lora.alpha 16.0 -> 8.0" in said


def test_adapters_alone_need_a_base_that_is_kept(base: Recipe, tmp_path: Path) -> None:
    for recipe in (
        adapting(base, tmp_path / "out", init_from=None),
        dataclasses.replace(adapting(base, tmp_path / "out"), lora=LoraConfig()),
    ):
        with pytest.raises(ValueError, match="adapters_only=True needs adapters and a base that is kept elsewhere"):
            recipe.check_layout(2)


def test_a_target_that_is_not_there_is_said_before_a_rank_starts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama_debug", "--nproc", "1", "--lora.rank", "4", "--lora.targets"]
    command, changes = parse_train([*words, "blocks.*.attention.o_proj"])
    assert command.recipe.lora == LoraConfig(rank=4, targets=("blocks.*.attention.o_proj",))
    assert "lora.rank 0 -> 4" in changes
    with pytest.raises(SystemExit) as end:
        parse_train([*words, "blocks.*.attention.o"])
    assert end.value.code != 0
    assert (
        "lora target 'blocks.*.attention.o' matches no module; the model's linear maps are" in capsys.readouterr().err
    )


def test_base_and_adapters_of_a_merged_checkpoint_are_read_part_by_part(base: Recipe, tmp_path: Path) -> None:
    recipe = adapting(base, tmp_path / "out", only=False, steps=2)
    run_ranks(1, train, recipe)
    source, merged = CheckpointSource(saved(recipe)), model_source(saved(recipe))
    name = "model.blocks.1.attention.q_proj.weight"
    a, b = (f"model.blocks.1.attention.q_proj.adapter.{each}.weight" for each in "ab")
    own, low, up = (source.read(each, whole(source.tensors[each][1])) for each in (name, a, b))
    expected = own + LORA.scale * up @ low
    box = Box((3, 5), (7, 11))
    assert torch.allclose(merged.read(name, box), expected[3:10, 5:16], rtol=0, atol=1e-14)


class Tensors:
    """Tensors in memory, as a source."""

    def __init__(self, **values: Tensor) -> None:
        self._values = {f"model.{name.replace('__', '.')}": each for name, each in values.items()}

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {name: (each.dtype, tuple(each.shape)) for name, each in self._values.items()}

    def read(self, name: str, box: Box) -> Tensor:
        ((row, column), (num_rows, num_columns)) = box.offsets, box.sizes
        return self._values[name][row : row + num_rows, column : column + num_columns].clone()


def hub_folder(path: Path, *, last: float = 1.0) -> str:
    """Two tensors in two files, of more than one part that is read at a time; the last value of all is given."""
    path.mkdir()
    first, second = torch.ones(8, 8), torch.ones(1100, 1024)
    second[-1, -1] = last
    save_file({"a": first}, path / "one.safetensors")
    save_file({"b": second}, path / "two.safetensors")
    (path / "config.json").write_text('{"model_type": "any"}')
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(path)


def adapters_alone(folder: Path, base: AdapterBase) -> str:
    """A checkpoint of one adapter that names its base."""
    adapters = Tensors(x__adapter__a__weight=torch.ones(2, 4), x__adapter__b__weight=torch.ones(4, 2))
    header = Header(step=1, num_tokens=0, world_size=1, stateful={"base": dict(base.state_dict())})
    return str(write_checkpoint(folder, adapters, header))


def test_a_hugging_face_base_of_the_same_sizes_with_another_value_is_refused(tmp_path: Path) -> None:
    base = AdapterBase.at(hub_folder(tmp_path / "hf"))
    path = adapters_alone(tmp_path / "tuned", base)
    assert base_path(path) == base.path
    (tmp_path / "hf").rename(tmp_path / "moved")
    moved, other = str(tmp_path / "moved"), hub_folder(tmp_path / "hf", last=1.5)
    with pytest.raises(ValueError, match="and their base is not where it was"):
        base_path(path)
    with pytest.raises(ValueError, match="trained on another base"):
        AdapterBase.at(other).load_state_dict(base.state_dict())
    assert find_base(path, moved) == AdapterBase.at(moved)


@pytest.mark.parametrize("damage", ["nothing in it", "no safetensors file"])
def test_a_base_that_is_named_serves_where_the_saved_place_holds_no_model(tmp_path: Path, damage: str) -> None:
    base = AdapterBase.at(hub_folder(tmp_path / "hf"))
    path = adapters_alone(tmp_path / "tuned", base)
    moved = shutil.copytree(tmp_path / "hf", tmp_path / "moved")
    if damage == "nothing in it":
        shutil.rmtree(base.path)
        Path(base.path).mkdir()
    else:
        (Path(base.path) / "one.safetensors").write_bytes(b"none")
    found = find_base(path, str(moved))
    assert found is not None
    assert found.path == str(moved)
    with pytest.raises(ValueError, match="and their base is not where it was"):
        find_base(path)


def test_a_narrow_base_is_rounded_once_when_adapters_are_merged() -> None:
    torch.manual_seed(0)
    own, up, low = torch.randn(32, 16).bfloat16(), torch.randn(32, 4), torch.randn(4, 16)
    adapters = Tensors(x__adapter__a__weight=low, x__adapter__b__weight=up)
    merged = MergedSource(Tensors(x__weight=own), adapters, LORA).read("model.x.weight", whole((32, 16)))
    exact = (own.double() + LORA.scale * up.double() @ low.double()).float()
    assert torch.equal(merged, exact.bfloat16())
