"""The command `python -m recipes.checkpoints`, and commands that take Hugging Face folders."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint import TrainState, filesystem, load, read_manifest, save, verify
from checkpoint.sources import CheckpointSource
from parallel import ParallelConfig, build_mesh
from parallel.materialize import allocate
from recipes.checkpoints.__main__ import COMMANDS, main
from recipes.checkpoints.dcp import ExportDcp, ImportDcp, export_on_rank, import_on_rank
from recipes.checkpoints.report import DIFFERENT, Report
from recipes.export import export_hub
from recipes.folder_lock import FolderLock
from recipes.from_checkpoint import find_checkpoint, load_weights, recipe_of
from recipes.generate import GenerateCommand, generate
from recipes.model import build_model
from tests.checkpoint.hub_folders import TOKENS, logits_by_transformers, make_folder
from tests.parallel.small_model import adamw, batches, build, whole
from tests.ranks import run_ranks


def command(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> Any:
    """Runs the command and gives what it printed as JSON, or on stderr where it failed."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, words), *([] if code == 1 else ["--json"])])
    printed = capsys.readouterr()
    assert end.value.code == code, printed.err
    return printed.err if code == 1 else json.loads(printed.out)


def save_run(folder: str, steps: list[int]) -> list[str]:
    trained = build(ParallelConfig(dp_shard=2), dtype=torch.float32)
    optimizer = trained.build_optimizer(adamw)
    trained.forward_backward(batches(trained.mesh, 0))
    optimizer.step()
    state = TrainState(trained=trained, optimizer=optimizer)
    paths = []
    for step in steps:
        state.step = step
        paths.append(str(save(folder, state)))
    return paths


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints of some steps."""
    run = tmp_path_factory.mktemp("run")
    run_ranks(2, save_run, str(run / "checkpoints"), [10, 20, 30])
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of it that may be spoilt."""
    return shutil.copytree(saved, tmp_path / "run")


def spoil(path: Path, byte: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 16
    path.write_bytes(data)


def test_ls_tells_of_all_that_lies_in_a_run_and_what_is_wrong_with_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints"
    (folder / "step-00000020" / "manifest.json").unlink()
    (folder / "step-00000030" / "protected").touch()
    (folder / ".step-00000040.tmp-0123abcd").mkdir()
    (folder / "something").mkdir()
    found = command(capsys, "ls", run)
    assert [each["step"] for each in found] == [10, 20, 30, 40]
    assert [each["complete"] for each in found] == [True, False, True, False]
    assert [each["protected"] for each in found] == [False, False, True, False]
    assert found[0]["layout"] == "fsdp2, dp_shard 2" and found[0]["num_bytes"] > 100_000 and found[0]["age_s"] < 1000
    assert "manifest.json" in found[1]["problem"] and "not complete" in found[3]["problem"]
    main_shows(capsys, ["ls", str(folder)], "step-00000030", "yes, protected", "NO")


def main_shows(capsys: pytest.CaptureFixture[str], words: list[str], *expected: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    printed = capsys.readouterr().out
    assert end.value.code == code and all(each in printed for each in expected), printed


def test_show_tells_what_a_checkpoint_holds(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = command(capsys, "show", saved)
    assert found["step"] == 30 and found["world_size"] == 2 and found["optimizer"]["class"] == "AdamW"
    assert found["tensors"]["model.norm.weight"] == {"dtype": "float32", "shape": [64]}
    main_shows(capsys, ["show", str(saved), "--tensors"], "step-00000030", "AdamW", "model.norm.weight: float32 [64]")


def test_verify_finds_the_one_that_is_damaged_and_says_so_with_its_code(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(each["sound"] for each in command(capsys, "verify", run))
    spoil(run / "checkpoints" / "step-00000020" / "rank-00001.safetensors")
    found = command(capsys, "verify", run, code=DIFFERENT)
    assert [each["sound"] for each in found] == [True, False, True]
    assert "rank-00001.safetensors" in found[1]["problems"][0]
    only = run / "checkpoints" / "step-00000020"
    main_shows(capsys, ["verify", str(only)], "DAMAGED", "rank-00001.safetensors", code=DIFFERENT)
    assert command(capsys, "verify", run / "checkpoints" / "step-00000030")[0]["sound"]
    (run / "checkpoints" / "step-00000010" / "manifest.json").unlink()
    assert [each["sound"] for each in command(capsys, "verify", run, code=DIFFERENT)] == [False, False, True]


def test_diff_lists_keys_and_the_largest_differences(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = saved / "checkpoints" / "step-00000010", saved / "checkpoints" / "step-00000020"
    assert command(capsys, "diff", one, other)["differences"] == []
    folder = make_folder(tmp_path / "a")
    changed = shutil.copytree(folder, tmp_path / "b")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 2
    tensors["lm_head.weight"][0, 0] = float("nan")
    tensors["lm_head.weight"][0, 1] += 1
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    found = command(capsys, "diff", folder, changed, code=DIFFERENT)
    first, second = found["differences"]
    assert first["name"] == "model.head.weight" and first["largest"] is None and first["num_different"] == 2
    assert second["name"] == "model.norm.weight" and second["largest"] == pytest.approx(2.0, rel=1e-6)
    assert found["num_equal"] == 19 and not found["only_a"] and not found["shapes"]
    found = command(capsys, "diff", folder, one, "--model", code=DIFFERENT)
    assert "model.embed.weight" in found["shapes"] and not found["only_a"] and not found["only_b"]
    assert "optimizer.norm.weight.exp_avg" in command(capsys, "diff", folder, one, code=DIFFERENT)["only_b"]
    main_shows(capsys, ["diff", str(folder), str(changed)], "model.norm.weight", "not a number", code=DIFFERENT)


def test_prune_says_what_would_go_and_then_removes_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    words = ("prune", run, "--keep", "1", "--keep-every", "20")
    planned = command(capsys, *words, "--dry-run")
    assert planned["removed"] == [str(folder / "step-00000010")] and len(list(folder.iterdir())) == 3
    done = command(capsys, *words)
    assert done["removed"] == planned["removed"]
    assert sorted(each.name for each in folder.iterdir()) == ["step-00000020", "step-00000030"]
    assert "keep=0 must be at least 1: prune leaves" in command(capsys, "prune", run, "--keep", "0", code=1)


def test_prune_counts_sound_checkpoints_alone_and_names_the_damaged_which_stay(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints"
    spoil(folder / "step-00000030" / "rank-00001.safetensors")
    main_shows(capsys, ["prune", str(run), "--keep", "1", "--dry-run"], "step-00000030: UNUSABLE", "1 sound")
    done = command(capsys, "prune", run, "--keep", "1")
    assert done["removed"] == [str(folder / "step-00000010")] and done["kept"] == [str(folder / "step-00000020")]
    (unusable,) = done["unusable"]
    assert unusable["path"] == str(folder / "step-00000030") and "rank-00001" in unusable["problems"][0]
    assert sorted(os.listdir(folder)) == ["step-00000020", "step-00000030"]
    spoil(folder / "step-00000020" / "rank-00000.safetensors")
    done = command(capsys, "prune", run, "--keep", "1")
    assert done["removed"] == done["kept"] == [] and len(done["unusable"]) == 2 and len(os.listdir(folder)) == 2


def test_prune_names_what_is_not_complete_and_damage_of_what_stays_for_good(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints"
    shutil.copytree(folder / "step-00000030", folder / "step-00000040")
    os.truncate(folder / "step-00000020" / "rank-00000.safetensors", 100)
    (folder / "step-00000010" / "protected").touch()
    spoil(folder / "step-00000010" / "rank-00000.safetensors")
    done = command(capsys, "prune", run, "--keep", "1")
    assert done["removed"] == [] and done["kept"] == [str(folder / "step-00000030")]
    problems = {Path(each["path"]).name: each["problems"][0] for each in done["unusable"]}
    assert problems.keys() == {"step-00000010", "step-00000020", "step-00000040"}
    assert "rank-00000.safetensors" in problems["step-00000020"] and "renamed" in problems["step-00000040"]
    main_shows(capsys, ["prune", str(run), "--keep", "1"], *problems.values())


def test_a_run_that_goes_on_keeps_its_checkpoints_by_whatever_path_they_are_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run / "checkpoints")
    with FolderLock(str(run)):
        for path in (".", "..", str(run)):
            assert "another run is writing to" in command(capsys, "prune", path, "--keep", "1", code=1)
    assert len(os.listdir(".")) == 3
    command(capsys, "prune", ".", "--keep", "1")
    assert os.listdir(".") == ["step-00000030"]


def test_brackets_in_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    Report(values=None, shown=["runs/[bold]x"]).print(as_json=False)
    assert capsys.readouterr().out == "runs/[bold]x\n"


def load_and_gather(path: str, layout: ParallelConfig) -> dict[str, Tensor]:
    trained = build(layout, dtype=torch.float32, seed=5)
    optimizer = trained.build_optimizer(adamw)
    state = TrainState(trained=trained, optimizer=optimizer)
    load(path, state)
    assert state.step == 30
    found = {fqn: whole(each) for fqn, each in trained.named_parameters().items()}
    moments = {
        f"{fqn}.exp_avg": whole(optimizer.state[each]["exp_avg"]) for fqn, each in trained.named_parameters().items()
    }
    return found | moments


@pytest.mark.parametrize("files", [1, 2, 5])
def test_a_checkpoint_that_is_divided_over_other_files_loads_with_all_it_has(
    files: int, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = command(capsys, "reshard", saved, tmp_path / "x", "--files", str(files))
    path = tmp_path / "x" / "step-00000030"
    assert done["path"] == str(path) and len(list(path.glob("*.safetensors"))) == files
    verify(path)
    layout = ParallelConfig(dp_shard=1, tp=2)
    before, after = (
        run_ranks(2, load_and_gather, str(each), layout)[0] for each in (saved / "checkpoints" / "step-00000030", path)
    )
    assert before.keys() == after.keys() and all(torch.equal(after[name], each) for name, each in before.items())
    manifest = read_manifest(path)
    assert manifest.header.optimizer == read_manifest(find_checkpoint(str(saved))).header.optimizer
    assert "is there already" in command(capsys, "reshard", saved, tmp_path / "x", code=1)
    assert "name another folder" in command(capsys, "reshard", saved, saved, code=1)
    assert "must be from 1 to 4,096" in command(capsys, "reshard", saved, tmp_path / "y", "--files", "5000", code=1)


def test_one_flipped_bit_ends_a_conversion_and_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run / "checkpoints" / "step-00000030" / "rank-00001.safetensors")
    assert "rank-00001.safetensors" in command(capsys, "reshard", run, tmp_path / "x", code=1)
    assert os.listdir(tmp_path) == ["run"]
    assert "rank-00001.safetensors" in command(capsys, "reshard", run, tmp_path / "x" / "y", code=1)
    assert os.listdir(tmp_path) == ["run"]
    (tmp_path / "x").mkdir()
    command(capsys, "reshard", run, tmp_path / "x", code=1)
    assert os.listdir(tmp_path / "x") == []


def test_diff_finds_a_resharded_checkpoint_equal_and_names_the_generators_of_other_ranks_apart(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, "reshard", saved, tmp_path / "x", "--files", "5")
    found = command(capsys, "diff", saved, tmp_path / "x")
    assert found["of_other_ranks"] == ["rng.cpu"] and not found["shapes"] and found["num_equal"] > 40
    assert command(capsys, "diff", saved, tmp_path / "x", "--model")["of_other_ranks"] == []
    main_shows(capsys, ["diff", str(saved), str(tmp_path / "x")], "no difference (1):", "  rng.cpu")
    one, other = saved / "checkpoints" / "step-00000010", saved / "checkpoints" / "step-00000030"
    assert command(capsys, "diff", one, other)["of_other_ranks"] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a model that knows bytes."""
    return make_folder(tmp_path_factory.mktemp("hub") / "small", "qwen3", dtype=torch.bfloat16, vocab_size=260)


def test_a_model_of_the_hub_comes_in_and_goes_out_bit_by_bit(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = command(capsys, "import-hf", folder, tmp_path / "run" / "checkpoints", "--files", "3")
    assert Path(done["path"]).name == "step-00000000" and done["num_files"] == 3
    assert recipe_of(done["path"]) == recipe_of(str(folder))
    words = ("export-hf", tmp_path / "run", tmp_path / "out", "--dtype", "bfloat16", "--max-file-bytes", "20000")
    written = command(capsys, *words)
    assert {"config.json", "model.safetensors.index.json"} < set(written["files"])
    theirs = load_file(folder / "model.safetensors")
    ours = {name: each for file in (tmp_path / "out").glob("*.safetensors") for name, each in load_file(file).items()}
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], each) for name, each in theirs.items())
    assert torch.equal(logits_by_transformers(tmp_path / "out", TOKENS), logits_by_transformers(folder, TOKENS))
    assert "is there already" in command(capsys, *words, code=1)


def test_the_tokenizer_of_a_folder_of_the_hub_goes_out_with_its_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(folder, tmp_path / "with a tokenizer")
    texts = {"tokenizer.json": '{"model": {}}', "tokenizer_config.json": '{"eos_token": "x"}', "other.txt": "no"}
    for name, text in texts.items():
        (source / name).write_text(text)
    command(capsys, "import-hf", source, tmp_path / "run")
    written = command(capsys, "export-hf", tmp_path / "run", tmp_path / "out")
    assert written["files"] == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert all((tmp_path / "out" / name).read_text() == texts[name] for name in written["files"][2:])
    shutil.rmtree(source)
    with pytest.warns(UserWarning, match="with a tokenizer/tokenizer.json' is not there; the folder gets none"):
        export_hub(find_checkpoint(str(tmp_path / "run")), tmp_path / "without")
    assert sorted(os.listdir(tmp_path / "without")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("words", [("ls",), ("prune", "--keep", "1"), ("verify",), ("show",), ("export-hf",)])
def test_a_file_in_the_place_of_a_folder_is_named_in_one_line(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "passwd").write_text("root:x:0:0")
    more = (tmp_path / "out",) if words[0] == "export-hf" else ()
    error = command(capsys, words[0], tmp_path / "passwd", *more, *words[1:], code=1)
    assert error.count("\n") == 1 and "passwd" in error and "folder" in error


def test_an_export_for_which_there_is_no_room_names_its_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(capsys, "import-hf", folder, tmp_path / "run")

    def full(descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(filesystem, "set_size", full)
    error = command(capsys, "export-hf", tmp_path / "run", tmp_path / "out", code=1)
    assert error == f"error: [Errno 28] No space left on device: '{tmp_path / 'out'}'\n"
    assert os.listdir(tmp_path) == ["run"]


def test_what_is_not_built_is_refused_by_name_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"use_sliding_window": True, "final_softcap": 3.0}
    (other / "config.json").write_text(json.dumps(config))
    error = command(capsys, "import-hf", other, tmp_path / "x", code=1)
    assert error.count("\n") == 1 and "final_softcap=3.0" in error and "use_sliding_window=True" in error
    assert not (tmp_path / "x").exists()


def sample(path: str, layout: ParallelConfig) -> str:
    request = GenerateCommand(checkpoint=path, prompt="ab", num_tokens=20, temperature=0.0, parallel=layout)
    return "".join(generate(request, recipe_of(find_checkpoint(path))))


def test_text_is_sampled_from_a_folder_of_the_hub_as_from_the_checkpoint_made_of_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, "import-hf", folder, tmp_path / "run" / "checkpoints")
    layout = ParallelConfig(dp_shard=1, tp=2)
    texts = {
        text
        for path in (str(folder), find_checkpoint(str(tmp_path / "run")))
        for text in run_ranks(2, sample, path, layout)
    }
    assert len(texts) == 1


def start_from(path: str, other: str) -> dict[str, Tensor]:
    recipe = recipe_of(path)
    trained = build_model(recipe, build_mesh(recipe.parallel))
    allocate(trained)
    with pytest.raises(ValueError, match=r"the model is another one .*model.rope_theta"):
        load_weights(other, trained, recipe)
    load_weights(path, trained, recipe)
    return {fqn: whole(each) for fqn, each in trained.named_parameters().items()}


def test_fine_tuning_starts_from_a_folder_of_the_hub_of_the_same_model_alone(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 3.0
    (other / "config.json").write_text(json.dumps(config))
    theirs = load_file(folder / "model.safetensors")
    for found in run_ranks(2, start_from, str(folder), str(other)):
        assert torch.equal(found["embed.weight"], theirs["model.embed_tokens.weight"].float())


@pytest.mark.parametrize("names", ["meshwright", "torchtitan"])
def test_a_checkpoint_goes_through_the_format_of_torch(
    names: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, "import-hf", folder, tmp_path / "a")
    checkpoint = find_checkpoint(str(tmp_path / "a"))
    recipe = recipe_of(checkpoint)
    exporting = ExportDcp(checkpoint=checkpoint, folder=str(tmp_path / "dcp"), names=names)
    run_ranks(2, export_on_rank, exporting, checkpoint, recipe)
    importing = ImportDcp(
        source=str(tmp_path / "dcp"), folder=str(tmp_path / "b"), recipe=str(folder), names=names, allow_pickle=True
    )
    run_ranks(2, import_on_rank, importing, recipe)
    assert command(capsys, "diff", tmp_path / "a", tmp_path / "b", "--model")["differences"] == []
    source = CheckpointSource(find_checkpoint(str(tmp_path / "b")))
    assert source.header.recipe == CheckpointSource(checkpoint).header.recipe


def test_the_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and all(name in shown for name in COMMANDS)
    assert "exit codes: 0 done; 1 an error" in shown
    with pytest.raises(SystemExit) as end:
        main(["nonsense"])
    assert end.value.code == 2


def test_what_is_no_checkpoint_is_one_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("show", tmp_path), ("ls", tmp_path / "x"), ("verify", tmp_path), ("export-hf", tmp_path, "y")):
        error = command(capsys, *words, code=1)
        assert error.startswith("error: ") and error.count("\n") == 1
    assert os.listdir(tmp_path) == []
