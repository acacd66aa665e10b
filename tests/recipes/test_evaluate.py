"""An evaluation gives the same figures on every mesh, and they are those written out by hand."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import recipes.evaluate
from parallel import IGNORE_INDEX, Batch, ParallelConfig
from recipes.data import TokenizerConfig, WeightedSource, load_dataset, load_tokenizer
from recipes.evaluate import EvaluateCommand, Evaluation, count_bytes, evaluate
from recipes.from_checkpoint import find_checkpoint, load_model
from recipes.recipe import Recipe
from recipes.train import train
from tests.ranks import run_ranks
from tests.recipes.data_stores import train_tokenizer, write_lines
from tests.recipes.small_recipe import small_recipe

TP = ParallelConfig(tp=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A float64 recipe after a few steps, from two ranks."""
    training = {"stored_dtype": "float64", "stop_at": 4}
    recipe = small_recipe(tmp_path_factory.mktemp("trained"), training=training)
    run_ranks(2, train, recipe)
    return recipe


def _in_small_turns(checkpoint: str, command: EvaluateCommand, recipe: Recipe) -> Evaluation:
    with mock.patch.object(recipes.evaluate, "BATCHES_AT_A_TIME", 2):
        return evaluate(checkpoint, command, recipe)


def _measure(recipe: Recipe, world_size: int = 1, **options: Any) -> Evaluation:
    data = {name: options.pop(name) for name in ("source", "format", "record", "mixture") if name in options}
    command = EvaluateCommand(data=dataclasses.replace(recipe.data, **data), **options)
    found = run_ranks(world_size, _in_small_turns, find_checkpoint(recipe.output.folder), command, recipe)
    assert all(each == found[0] for each in found)
    evaluation: Evaluation = found[0]
    return evaluation


def _text(folder: Path) -> tuple[str, bytes]:
    """Two files of which one has characters of several bytes."""
    (folder / "text").mkdir()
    texts = {"a.txt": "mesh rank shard axis, view \N{SNOWMAN} " * 3, "b.txt": "na\xefve axis " * 5}
    for name, text in texts.items():
        (folder / "text" / name).write_text(text)
    return str(folder / "text"), "".join(texts.values()).encode()


def _by_hand(checkpoint: str, recipe: Recipe) -> float:
    """The summed loss of all samples, from logits and the logarithm written out."""
    trained, text = load_model(checkpoint, recipe, ParallelConfig()), load_dataset(recipe.data).train
    loss_sum = 0.0
    for index in range(text.num_samples):
        tokens, labels, positions, document_ids = (torch.from_numpy(each)[None] for each in text.sample(index))
        logits = trained.logits(tokens, positions=positions, document_ids=document_ids)[0]
        predicted = labels[0] != IGNORE_INDEX
        chosen = logits[predicted].gather(1, labels[0][predicted][:, None])[:, 0]
        loss_sum += (logits[predicted].logsumexp(1) - chosen).sum().item()
    return loss_sum


def test_loss_tokens_and_bytes_of_files_are_those_written_out(trained: Recipe, tmp_path: Path) -> None:
    source, text = _text(tmp_path)
    found = _measure(trained, source=source)
    data = dataclasses.replace(trained.data, source=source, held_out_fraction=0.0)
    checkpoint = find_checkpoint(trained.output.folder)
    (loss_sum,) = run_ranks(1, _by_hand, checkpoint, dataclasses.replace(trained, data=data))
    # All bytes and the end of each document are predicted, its beginning is not.
    assert (found.num_bytes, found.num_tokens) == (len(text), len(text) + 2)
    assert found.loss_sum == pytest.approx(loss_sum, rel=1e-12)
    assert found.nats_per_token == pytest.approx(loss_sum / (len(text) + 2), rel=1e-12)
    assert found.nats_per_byte == pytest.approx(loss_sum / len(text), rel=1e-12)
    assert found.perplexity == pytest.approx(math.exp(loss_sum / (len(text) + 2)), rel=1e-12)


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("parallel", [ParallelConfig(), TP], ids=["full_shard 2", "tp 2"])
def test_the_figures_do_not_depend_on_mesh_and_micro_batch(
    parallel: ParallelConfig, micro_batch: int, trained: Recipe, tmp_path: Path
) -> None:
    source, _ = _text(tmp_path)
    one = _measure(trained, source=source)
    found = _measure(trained, 2, source=source, parallel=parallel, micro_batch=micro_batch)
    assert dataclasses.replace(found, loss_sum=one.loss_sum) == one
    assert found.loss_sum == pytest.approx(one.loss_sum, rel=1e-12)


def test_by_default_it_measures_what_the_run_held_out(trained: Recipe) -> None:
    records = [json.loads(line) for line in trained.output.metrics.read_text().splitlines()]
    (logged,) = (record for record in records if record["kind"] == "evaluation")
    found = _measure(trained)
    assert found.num_tokens == logged["num_tokens"]
    assert found.nats_per_token == pytest.approx(logged["loss"], rel=1e-12)
    everything = _measure(trained, side="all")
    text = sum(len(file.read_bytes()) for file in Path(trained.data.source).iterdir())
    assert found.num_bytes < everything.num_bytes == text


def test_the_run_s_own_text_is_known_by_where_it_lies_not_by_how_its_path_is_written(trained: Recipe) -> None:
    for written in (f"{trained.data.source}/", os.path.relpath(trained.data.source)):
        assert _measure(trained, source=written) == _measure(trained)


def test_of_a_mixture_all_sources_are_measured(trained: Recipe, tmp_path: Path) -> None:
    source, text = _text(tmp_path)
    mixture = (WeightedSource(source=source), WeightedSource(source=trained.data.source))
    own = sum(len(file.read_bytes()) for file in Path(trained.data.source).iterdir())
    assert _measure(trained, source="python-stdlib", mixture=mixture).num_bytes == len(text) + own


def test_fewer_sequences_are_spread_over_the_text(trained: Recipe, tmp_path: Path) -> None:
    source, _ = _text(tmp_path)
    found = [_measure(trained, n, source=source, max_sequences=3) for n in (1, 2)]
    assert [each.num_sequences for each in found] == [3, 3]
    assert found[0].loss_sum == pytest.approx(found[1].loss_sum, rel=1e-12)
    assert recipes.evaluate.spread(10, 3) == [0, 3, 6]


def test_of_a_chat_only_what_the_assistant_says_is_measured(trained: Recipe, tmp_path: Path) -> None:
    answers = ("axis", "rank 1")
    lines = [{"prompt": "mesh ", "completion": answer} for answer in answers]
    source = write_lines(tmp_path / "chat.jsonl", lines)
    found = _measure(trained, source=source, record="chat")
    assert found.num_bytes == sum(map(len, answers))
    assert found.num_tokens == sum(len(answer) + 1 for answer in answers)


def test_bytes_of_a_tokenizer_are_those_of_the_text_that_its_tokens_stand_for(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(file=train_tokenizer(tmp_path / "tokenizer.json")))
    texts = ("the cat na\xefve \N{SNOWMAN}", " and the hat")
    rows = [[IGNORE_INDEX, *tokenizer.encode(text), tokenizer.eos] for text in texts]
    assert max(map(len, rows)) < sum(len(text.encode()) for text in texts)
    joined = torch.tensor([rows[0] + rows[1]])
    batch = Batch.from_tokens(torch.zeros_like(joined), joined)
    assert count_bytes(batch, tokenizer) == sum(len(text.encode()) for text in texts)


def test_a_perplexity_beyond_all_bounds_and_no_token_at_all_are_told() -> None:
    assert (
        Evaluation(loss_sum=1e6, num_tokens=10, num_bytes=10, num_sequences=1, sequence_length=8).perplexity == math.inf
    )
    nothing = Evaluation(loss_sum=0.0, num_tokens=0, num_bytes=0, num_sequences=1, sequence_length=8)
    assert math.isnan(nothing.nats_per_token) and math.isnan(nothing.nats_per_byte)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)


def test_the_command_prints_the_figures(
    trained: Recipe, tmp_path: Path, one_rank: None, capfd: pytest.CaptureFixture[str]
) -> None:
    source, text = _text(tmp_path)
    recipes.evaluate.main([trained.output.folder, "--data.source", source])
    assert not dist.is_initialized()
    out, err = capfd.readouterr()
    checkpoint, of, counts, loss, perplexity = out.splitlines()
    assert checkpoint.endswith("step-00000004")
    assert of == f"text       {source}, all of it"
    assert counts.startswith(f"on         {len(text) + 2:,} tokens for {len(text):,} bytes, in ")
    assert " nats a token, " in loss and " bits)" in loss
    assert float(perplexity.split()[1]) == pytest.approx(math.exp(float(loss.split()[1])), rel=1e-3)
    assert err == ""


def test_what_cannot_be_measured_is_refused_in_one_line(
    trained: Recipe, tmp_path: Path, one_rank: None, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = trained.output.folder
    for words, message in (
        ([str(tmp_path / "none")], "there is no checkpoint"),
        (["--data.source", "x"], "the first word must be a checkpoint, got '--data.source'; usage: python -m"),
        ([folder, "--data.source", "/no/such/text"], "no such file or folder"),
        ([folder, "--data.held-out-fraction", "0", "--side", "held_out"], "nothing of the text is held out"),
        ([folder, "--parallel.tp", "3"], "1 ranks are not a multiple of"),
        ([folder, "--data.tokenizer.file", "/no/such.json"], "there is no tokenizer file"),
    ):
        with pytest.raises(SystemExit) as end:
            recipes.evaluate.main(words)
        if dist.is_initialized():
            dist.destroy_process_group()
        err = capfd.readouterr().err
        assert end.value.code == 1
        assert message in err
        assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_the_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        recipes.evaluate.main(words)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m recipes.evaluate CHECKPOINT")
    for option in ("--side", "--max-sequences", "--data.source", "--parallel.tp"):
        assert option in shown
    with pytest.raises(SystemExit) as end:
        recipes.evaluate.main(["--micro-batch", "0"])
    assert end.value.code
