"""What the commands say of bad input, and that one rank says it, once."""

import contextlib
import dataclasses
import importlib
import io
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from docstring_parser import parse as parse_docstring

import recipes.first_run
import recipes.generate
import recipes.messages
import recipes.train
from models.layers.rotary import RotaryScaling
from models.llama import LlamaConfig
from parallel import ParallelConfig
from recipes.command import parse, parse_train
from recipes.data import WeightedSource, load_dataset
from recipes.find import find_recipe
from recipes.launchers import is_first_rank, join_launcher, world_size_to_come
from recipes.recipe import Recipe, changed_fields
from recipes.structure import from_json
from tests.ranks import run_ranks
from tests.recipes.small_recipe import moved, small_recipe, write_recipe_file

CORRUPT = 20


@dataclasses.dataclass(frozen=True)
class Said:
    """What a command left on one rank."""

    code: object
    out: str
    err: str


def _refused(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], None], *words: str) -> str:
    """Runs a command that must fail before any rank starts, and returns its one message."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    assert end.value.code not in (0, None)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def _error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    said = _refused(capsys, recipes.train.main, *words)
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def _main_on_rank(module: str, words: list[str]) -> Said:
    """A command as a launcher runs it: the pool of ranks sets the environment that torchrun sets."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    # Nobody ends these ranks, so that they need not wait for each other.
    at_once = mock.patch.object(recipes.messages, "SAY_S", 0.0)
    with at_once, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            importlib.import_module(module).main(words)
        except SystemExit as end:
            code = end.code
    return Said(code, out.getvalue(), err.getvalue())


def _on_ranks(module: str, *words: str) -> Said:
    """Runs a command on two ranks, of which the second says nothing and ends with the same code."""
    first, second = run_ranks(2, _main_on_rank, module, list(words))
    assert (second.out, second.err) == ("", "")
    assert second.code == first.code
    return first


def _rank_error(module: str, *words: str) -> str:
    said = _on_ranks(module, *words)
    assert said.code == 1
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe_file(tmp_path_factory.mktemp("recipe")))


@pytest.fixture(scope="module")
def trained(recipe_file: str) -> Recipe:
    """A recipe after three steps on two ranks."""
    said = _on_ranks("recipes.train", recipe_file, "--training.stop-at", "3")
    assert (said.code, said.err) == (0, "")
    return find_recipe(recipe_file)


def test_bad_words_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown recipe 'llama_debgu'; legal: llama_3_1_405b" in _error(capsys, "llama_debgu")
    assert "the first word must be a recipe, got '--nproc'" in _error(capsys, "--nproc", "2", "llama_debug")
    assert "nproc=0 must be at least 1" in _error(capsys, "llama_debug", "--nproc", "0")
    assert "there is no recipe file 'nowhere.py'" in _error(capsys, "nowhere.py")
    assert "steps=0 must be at least 1" in _error(capsys, "llama_debug", "--training.steps", "0")


V = "llama_debug --parallel.pp 2 --parallel.schedule dual_pipe_v"


def test_full_checkpointing_where_backward_is_split_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--nproc 2 --parallel.pp 2 --parallel.activation-checkpointing full --training.micro-batch 1"
    for schedule, is_warned in (("zbv_zero_bubble", True), ("1f1b", False)):
        parse_train(["llama_debug", *words.split(), "--parallel.schedule", schedule])
        said = capsys.readouterr().err
        assert ("warning: activation_checkpointing='full' with schedule='zbv_zero_bubble'" in said) == is_warned


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("train", "llama_debug --parallel.pp 2", "pp=2 needs a schedule; legal: "),
        ("ledger", "llama_debug --parallel.pp 2", "pp=2 needs a schedule; legal: "),
        ("ledger", "llama_debug --optimizer foo", "does not know optimizer 'foo'; legal: adamw, "),
        (
            "ledger",
            f"{V} --world-size 2 --training.global-batch 2",
            "schedule='dual_pipe_v' cannot run ",
        ),
        ("bench", "step --rounds 0", "rounds=0 must be"),
        ("plan", "debug --gpus 0", "gpus=0 must be"),
    ],
)
def test_options_that_contradict_each_other_are_one_line_and_code_1_in_every_command(
    command: str, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"recipes.{command}" if command == "train" else f"recipes.{command}.__main__"
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main(words.split())
    said = capsys.readouterr().err
    assert end.value.code == 1
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nproc 2 --parallel.tp 3", "2 ranks are not a multiple of"),
        ("--nproc 2 --parallel.dp-shard 3", "multiply to 3, but the world has 2 ranks"),
        ("--nproc 8 --parallel.tp 8", "tp=8 must divide num_kv_heads=4; legal here: [1, 2, 4]"),
        ("--nproc 2 --parallel.data-parallel none", "'none' is one process; the world has 2 ranks"),
        ("--schedule.warmup-steps 301", "warmup_steps=301 must not exceed the 300 optimizer steps"),
        ("--nproc 2 --parallel.tp 2 --data.sequence-length 33", "nearest legal: 32 or 34"),
        ("--model.vocab-size 200", "vocab_size=200 must be at least the 260 tokens of the data's tokenizer"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_before_a_rank_starts(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in _error(capsys, "llama_debug", *words.split())


def test_unknown_fields_and_wrong_types_are_explained_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused(capsys, recipes.train.main, "llama_debug", "--training.stepz", "3")
    assert "Unrecognized options: --training.stepz" in said
    assert "--training.steps INT" in said
    assert "invalid literal for int() with base 10: 'many'" in _refused(
        capsys, recipes.train.main, "llama_debug", "--training.steps", "many"
    )
    assert "ring2" in _refused(capsys, recipes.train.main, "llama_debug", "--parallel.cp-method", "ring2")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recipes.train.main(["llama_debug", "--nproc", "0", "--debug"])
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "must define a function recipe() that returns a Recipe"),
        ("def recipe():\n    return 3", "must define a function recipe() that returns a Recipe"),
        ("import no_such_module", "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("def recipe():\n    return 1 / 0", "raised ZeroDivisionError: division by zero"),
        ("def recipe(:", "raised SyntaxError"),
    ],
)
def test_a_file_that_makes_no_recipe_is_named(
    code: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code)
    said = _error(capsys, str(path))
    assert str(path) in said
    assert message in said


def test_a_folder_is_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.py").mkdir()
    assert "there is no recipe file" in _error(capsys, str(tmp_path / "folder.py"))
    assert "unknown recipe" in _error(capsys, str(tmp_path))


def test_a_recipe_file_may_define_dataclasses_under_postponed_annotations(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from recipes.llama_debug import recipe\n@dataclass\nclass Own:\n    value: int = 1\n"
    )
    assert find_recipe(str(path)) == find_recipe("llama_debug")


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Option and description of each field of a config that is one value."""
    # A config that extends another describes its own fields only.
    docs = [parse_docstring(kind.__doc__ or "") for kind in type(config).__mro__ if dataclasses.is_dataclass(kind)]
    texts = {each.arg_name: each.description or "" for doc in docs for each in doc.params}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{each.name}.")
        else:
            yield f"--{prefix}{each.name}".replace("_", "-"), texts.get(each.name, "")


def _squeezed(text: str) -> str:
    return re.sub(r"[\s│]+", "", text)


def test_help_shows_every_field_with_its_meaning_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_train(["llama_debug", "--help"])
    assert end.value.code == 0
    shown = _squeezed(capsys.readouterr().out)
    listed = list(_fields(find_recipe("llama_debug")))
    assert len(listed) > 50
    for option, text in listed:
        assert text, f"{option} has no description"
        assert option in shown
        assert _squeezed(text) in shown, option
    assert shown.count("(default:") >= len(listed)
    assert _squeezed("--model.rope-scaling {None}|factor=...") in shown
    assert _squeezed("--data.mixture [source=...") in shown


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_without_a_recipe_the_recipes_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_train(words)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    listed = re.search("recipes: (.*), or the path of a .py file with a function recipe\\(\\)", shown)
    assert listed
    assert "llama_3_1_8b (for 64 ranks), llama_3_1_8b_128k (for 64 ranks), llama_3_2_1b (for 8 ranks)" in listed[1]
    assert ", llama_debug, moe_debug, moe_qwen3_30b_a3b (for 64 ranks), smollm2_135m" in listed[1]
    assert "All fields of llama_debug follow" in shown
    assert "--training.steps INT" in shown


def test_overrides_reach_the_recipe_and_are_listed() -> None:
    words = [
        "llama_debug",
        "--nproc",
        "2",
        "--training.steps",
        "7",
        "--schedule.warmup-steps",
        "2",
        "--data.patterns",
        "*.c",
        "*.h",
    ]
    command, changes = parse_train([*words, "--model.rope-scaling", "factor=32,original_sequence_length=4096"])
    assert command.recipe.training.steps == 7
    assert command.recipe.data.patterns == ("*.c", "*.h")
    scaling = RotaryScaling(factor=32.0, original_sequence_length=4096)
    assert command.recipe.model == LlamaConfig.preset("debug", rope_scaling=scaling)
    assert [change.split()[0] for change in changes] == [
        "model.rope_scaling",
        "data.patterns",
        "schedule.warmup_steps",
        "training.steps",
    ]
    assert "training.steps 300 -> 7" in changes


def test_several_sources_are_given_as_a_word_each() -> None:
    words = ["--data.mixture", "source=/code,weight=2", "source=7,format=jsonl"]
    command, changes = parse_train(["llama_debug", "--nproc", "2", *words])
    assert command.recipe.data.mixture == (
        WeightedSource(source="/code", weight=2.0),
        WeightedSource(source="7", format="jsonl"),
    )
    assert [change.split()[0] for change in changes] == ["data.mixture"]


def test_a_bad_part_of_an_optional_config_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for word, message in (
        ("factor=0.5", "factor=0.5 must be at least 1; leave the scaling out to scale nothing"),
        ("factors=2", "unknown field factors"),
        ("factor", "expected name=value, got 'factor'"),
        ("factor=much", "'much' is no float @ .factor"),
    ):
        for words in (("--model.rope-scaling", word), (f"--model.rope-scaling={word}",)):
            said = _error(capsys, "llama_debug", "--nproc", "2", *words)
            assert said == f"error: --model.rope-scaling {word}: {message}\n"


@dataclasses.dataclass(frozen=True)
class WarningCommand:
    """Warns.

    Attributes:
        level: At 2 it is refused, after it has warned.
    """

    level: int = 0

    def __post_init__(self) -> None:
        warnings.warn(f"level {self.level} is odd", stacklevel=2)
        if self.level == 2:
            raise ValueError("level=2 must be less")


def test_what_is_said_while_a_command_line_is_read_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with recipes.messages.one_message(debug=False):
        assert parse(WarningCommand, ["--level", "1"], "program").level == 1
    assert capsys.readouterr().err == "warning: level 1 is odd\n"
    with pytest.raises(SystemExit), recipes.messages.one_message(debug=False):
        parse(WarningCommand, ["--level", "2"], "program")
    assert capsys.readouterr().err == "warning: level 2 is odd\nerror: level=2 must be less\n"
    with pytest.raises(SystemExit) as end, recipes.messages.one_message(debug=False):
        parse(WarningCommand, ["--level", "much"], "program")
    assert end.value.code == 2
    assert "invalid literal for int()" in capsys.readouterr().err


def _rich_recipe(tmp_path: Path) -> Recipe:
    recipe = small_recipe(tmp_path, training={"max_gradient_norm": None, "stored_dtype": "float64"})
    model = LlamaConfig.preset("debug", rope_scaling=RotaryScaling(factor=32.0), head_dim=16, tied_embeddings=True)
    return dataclasses.replace(recipe, model=model, parallel=ParallelConfig(dp_replicate=2, strategy="hybrid_shard"))


def test_a_recipe_survives_json(tmp_path: Path) -> None:
    for recipe in (find_recipe("llama_debug"), _rich_recipe(tmp_path)):
        assert from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
        assert changed_fields(recipe.to_json(), json.loads(json.dumps(recipe.to_json()))) == []


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (("training", "steps"), "300", "'300' is no int"),
        (("training", "steps"), 3.7, "3.7 is no int"),
        (("training", "steps"), True, "True is no int"),
        (("training", "stepz"), 3, "unknown field stepz"),
        (("model", "qk_norm"), 1, "1 is no bool"),
        (("model", "family"), "gpt", "unknown model family 'gpt'; legal: llama"),
        (("optimizer", "lr"), "much", "'much' is no float"),
        (("parallel", "data_parallel"), "fsdp3", "fsdp3"),
        (("data", "patterns"), 3, "patterns"),
        (("output",), None, "output"),
    ],
)
def test_a_saved_recipe_of_another_version_is_refused_in_one_line(
    part: tuple[str, ...], value: object, message: str
) -> None:
    values = json.loads(json.dumps(find_recipe("llama_debug").to_json()))
    place = values
    for name in part[:-1]:
        place = place[name]
    place[part[-1]] = value
    with pytest.raises(ValueError, match="does not fit this version of meshwright") as refusal:
        from_json(values)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_run_prints_a_table_of_what_it_resolved_to(recipe_file: str, tmp_path: Path) -> None:
    words = ("--training.stop-at", "1", "--parallel.tp", "2", "--output.folder", str(tmp_path / "out"))
    rate = ("--optimizer.lr-scaling", "sqrt", "--optimizer.lr-reference-batch", "24", "--schedule.shape", "wsd")
    said = _on_ranks("recipes.train", recipe_file, *words, *rate, "--metrics.peak-tflops", "0.001")
    assert (said.code, said.err) == (0, "")
    shown = " ".join(re.sub(r"[│\s]+", " ", said.out).split())
    for part in (
        "recipe small",
        "llama, 32.16 k parameters: 2 blocks of width 32",
        "fsdp2 full_shard, tp 2, with sequence parallel, with loss parallel",
        "6 sequences x 16 tokens = 96 tokens a step; 3 micro-batch(es) of 2 on each of 1 data-parallel rank(s)",
        "16, stopping after 1",
        "up to 0.005 (0.01 at 24 sequences, scaled by sqrt rule to 6) in 2 steps, then stable, in the last 2 steps "
        "linear to 0.1 of it",
        "MFU of 0.001 TFLOP/s a device, by full_attention: 0.000155 GFLOPs a token",
        # Half of that peak in the first of two steps of warm-up.
        "lr 2.50e-03",
        "517 tokens, 74 held out (13 %)",
        "parallel.tp 1 -> 2",
        "training.stop_at None -> 1",
        "from scratch",
    ):
        assert part in shown


def test_text_that_is_not_there_is_named(recipe_file: str, tmp_path: Path) -> None:
    assert "no such file or folder" in _rank_error("recipes.train", recipe_file, "--data.source", "/no/such/text")
    assert "holds no files" in _rank_error("recipes.train", recipe_file, "--data.source", str(tmp_path))
    (tmp_path / "short.txt").write_text("short")
    assert "too little text" in _rank_error("recipes.train", recipe_file, "--data.source", str(tmp_path))


def test_an_output_folder_that_cannot_be_written_fails_on_all_ranks(recipe_file: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = _rank_error("recipes.train", recipe_file, "--output.folder", str(tmp_path / "file"))
    assert f"could not use {tmp_path}/file: " in said
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").write_text("")
    said = _rank_error("recipes.train", recipe_file, "--output.folder", str(tmp_path / "out"))
    assert f"could not use {tmp_path}/out/checkpoints: " in said
    (tmp_path / "metrics" / "metrics.jsonl").mkdir(parents=True)
    said = _rank_error("recipes.train", recipe_file, "--output.folder", str(tmp_path / "metrics"))
    # What rank 0 alone met.
    assert "rank 0: cannot write metrics to" in said


def test_a_checkpoint_of_another_model_is_refused(trained: Recipe, recipe_file: str) -> None:
    said = _rank_error("recipes.train", recipe_file, "--model.width", "64", "--model.tied-embeddings")
    assert "model.width 32 -> 64; model.tied_embeddings False -> True" in said
    assert "name another output.folder" in said


def test_other_text_or_another_length_is_refused_on_resume(trained: Recipe, recipe_file: str) -> None:
    said = _rank_error("recipes.train", recipe_file, "--data.sequence-length", "8")
    assert "the data differ (saved -> now): sequence_length 16 -> 8" in said


def test_a_corrupt_checkpoint_is_refused(trained: Recipe, recipe_file: str, tmp_path: Path) -> None:
    recipe = moved(trained, tmp_path / "out")
    file = sorted(recipe.output.checkpoints.glob("step-*/rank-*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    # The header's first bytes give its length.
    data[:4] = b"\xff\xff\xff\x7f"
    file.write_bytes(data)
    said = _on_ranks("recipes.train", recipe_file, "--output.folder", str(tmp_path / "out"))
    assert said.code == 1
    # There are no checkpoints before it.
    warning, error = said.err.splitlines()
    assert warning.startswith("warning: ") and warning.endswith("going back to the checkpoint before it")
    assert error.startswith("error: ") and "holds no other complete checkpoint" in error and str(file) in error


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over_them(
    trained: Recipe, recipe_file: str, tmp_path: Path
) -> None:
    recipe = moved(trained, tmp_path / "out")
    for file in recipe.output.checkpoints.glob("step-*/rank-00000.safetensors"):
        file.unlink()
    said = _on_ranks("recipes.train", recipe_file, "--output.folder", str(tmp_path / "out"))
    assert said.code == 1
    assert said.err.splitlines()[-1].startswith(f"error: {recipe.output.checkpoints} holds step-")
    assert "a run from scratch would replace them" in said.err


def test_a_changed_schedule_is_one_warning_on_rank_0(trained: Recipe, recipe_file: str, tmp_path: Path) -> None:
    moved(trained, tmp_path / "out")
    words = ("--output.folder", str(tmp_path / "out"), "--training.steps", "4")
    said = _on_ranks("recipes.train", recipe_file, *words)
    assert said.code == 0
    assert said.err == ("warning: the learning-rate schedule changes on resume (saved -> now): total_steps 16 -> 4\n")


def _train_on_another_text(recipe: Recipe) -> str:
    if not is_first_rank():
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, held_out_fraction=0.4))
    with pytest.raises(ValueError) as refusal:
        recipes.train.train(recipe)
    return str(refusal.value)


def test_ranks_with_different_recipes_or_texts_do_not_train(tmp_path: Path) -> None:
    for said in run_ranks(2, _train_on_another_text, small_recipe(tmp_path)):
        assert said.startswith("rank 1 has another recipe than rank 0")


def _train_after_a_file_changed(recipe: Recipe) -> str:
    if not is_first_rank():
        private = Path(recipe.output.folder) / "private"
        shutil.copytree(recipe.data.source, private)
        for file in private.iterdir():
            file.write_text(file.read_text() + "!")
        real = load_dataset
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                recipes.train, "load_dataset", lambda data: real(dataclasses.replace(data, source=str(private)))
            )
            with pytest.raises(ValueError) as refusal:
                recipes.train.train(recipe)
        return str(refusal.value)
    with pytest.raises(ValueError) as refusal:
        recipes.train.train(recipe)
    return str(refusal.value)


def test_ranks_that_read_different_files_do_not_train(tmp_path: Path) -> None:
    for said in run_ranks(2, _train_after_a_file_changed, small_recipe(tmp_path)):
        assert said.startswith("rank 1 has another text to train on than rank 0")


def test_under_a_launcher_the_parser_speaks_on_rank_0_alone(recipe_file: str) -> None:
    said = _on_ranks("recipes.train", recipe_file, "--training.stepz", "3")
    assert said.code == 2
    assert said.err.count("Unrecognized options: --training.stepz") == 1
    assert "nproc=4, but a launcher has started 2 ranks" in _rank_error("recipes.train", recipe_file, "--nproc", "4")
    assert "start it without a launcher" in _rank_error("recipes.first_run")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_srun_and_mpirun_are_joined_too(no_launcher: pytest.MonkeyPatch) -> None:
    assert not join_launcher()
    assert is_first_rank()
    slurm = {"PROCID": "3", "STEP_NUM_TASKS": "8", "LOCALID": "1", "STEP_TASKS_PER_NODE": "2(x4)"}
    for name, value in slurm.items():
        no_launcher.setenv(f"SLURM_{name}", value)
    assert not is_first_rank()
    with pytest.raises(ValueError, match="MASTER_ADDR is not set"):
        join_launcher()
    no_launcher.setenv("MASTER_ADDR", "node0")
    assert world_size_to_come(None) == 8
    assert world_size_to_come(8) == 8


def test_an_allocation_of_one_task_is_no_launcher(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("SLURM_PROCID", "0")
    no_launcher.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert world_size_to_come(2) == 2
