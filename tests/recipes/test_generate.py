"""Sampling from a checkpoint: the same text on every mesh, any prompt, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch.distributed as dist

import recipes.generate
from checkpoint import TrainState, save
from parallel import ParallelConfig
from recipes.from_checkpoint import find_checkpoint
from recipes.generate import GenerateCommand, generate
from recipes.recipe import Recipe
from recipes.train import train
from tests.parallel import small_model
from tests.ranks import run_ranks
from tests.recipes.small_recipe import small_recipe

TP = ParallelConfig(tp=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A float64 recipe after a few steps, so that rounding cannot tip a draw."""
    training = {"stored_dtype": "float64", "stop_at": 8}
    recipe = small_recipe(tmp_path_factory.mktemp("trained"), training=training)
    run_ranks(2, train, recipe)
    return recipe


def _sample(recipe: Recipe, parallel: ParallelConfig | None = None, world_size: int = 2, **options: object) -> str:
    command = GenerateCommand(
        checkpoint=str(recipe.output.checkpoints),
        parallel=parallel or ParallelConfig(),
        **{"prompt": "mesh ", "num_tokens": 12, **options},  # type: ignore[arg-type]
    )
    texts = run_ranks(world_size, generate, command, recipe)
    assert len(set(texts)) == 1
    return str(texts[0])


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_the_text_depends_on_the_seed_and_not_on_the_mesh(temperature: float, trained: Recipe) -> None:
    one = _sample(trained, world_size=1, temperature=temperature, seed=1)
    assert one
    assert _sample(trained, temperature=temperature, seed=1) == one
    assert _sample(trained, TP, temperature=temperature, seed=1) == one
    other = _sample(trained, world_size=1, temperature=temperature, seed=2)
    assert (other == one) == (temperature == 0)


@pytest.mark.parametrize(
    "prompt",
    ["", "a", "ab", "mesh rank shard view axis", "\N{SNOWMAN} na\xefve", "\udcff"],
    ids=["empty", "2 tokens", "3 tokens", "longer than the context", "unicode", "no UTF-8"],
)
def test_any_prompt_is_continued_under_sequence_parallel(prompt: str, trained: Recipe) -> None:
    assert _sample(trained, TP, prompt=prompt, num_tokens=4) == _sample(
        trained, world_size=1, prompt=prompt, num_tokens=4
    )


def test_a_checkpoint_is_found_from_the_folder_of_its_run_too(trained: Recipe) -> None:
    found = find_checkpoint(trained.output.folder)
    assert Path(found).name == "step-00000008"
    assert find_checkpoint(str(trained.output.checkpoints)) == found
    assert find_checkpoint(found) == found


def _print_sample(words: list[str]) -> None:
    recipes.generate.main(words)
    # The command leaves the group; the pool of ranks expects none either.
    assert not dist.is_initialized()


def test_the_command_prints_prompt_and_sample_once(
    trained: Recipe, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    _print_sample([trained.output.folder, "--prompt", "rank \udcff", "--num-tokens", "5", "--temperature", "0"])
    out, err = capfd.readouterr()
    assert out.startswith("rank \N{REPLACEMENT CHARACTER}")
    assert err == ""


def _save_without_a_recipe(folder: Path) -> None:
    save(folder, TrainState(trained=small_model.build(ParallelConfig())))


def test_what_cannot_be_sampled_is_refused_in_one_line(
    trained: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, _save_without_a_recipe, tmp_path / "bare")
    (tmp_path / "empty").mkdir()
    folder = trained.output.folder
    for words, message in (
        ([str(tmp_path / "none")], "there is no checkpoint"),
        ([str(tmp_path / "empty")], "holds no complete checkpoint"),
        ([str(tmp_path / "bare")], "holds no recipe: a script saved it"),
        ([folder, "--nproc", "2", "--parallel.tp", "3"], "2 ranks are not a multiple of"),
        ([folder, "--nproc", "4", "--parallel.tp", "4"], "tp=4 must divide"),
        ([folder, "--nproc", "0"], "nproc=0 must be at least 1"),
    ):
        with pytest.raises(SystemExit) as end:
            recipes.generate.main(words)
        err = capsys.readouterr().err
        assert end.value.code == 1
        assert message in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize(("option", "value"), [("temperature", "-1"), ("num-tokens", "0"), ("seed", "-1")])
def test_options_out_of_range_are_refused(
    option: str, value: str, trained: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        recipes.generate.main([trained.output.folder, f"--{option}", value])
    assert end.value.code
    err = capsys.readouterr().err
    assert option.replace("-", "_") in err
    assert "Traceback" not in err


def test_a_recipe_of_a_checkpoint_takes_the_layout_of_the_command(trained: Recipe) -> None:
    assert _sample(dataclasses.replace(trained, parallel=TP), world_size=1) == _sample(trained, world_size=1)
