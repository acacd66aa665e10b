"""A recipe that trains in a second, its words on a command line, and its file."""

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

from models.llama import LlamaConfig
from parallel import ParallelConfig
from recipes.data import DataConfig
from recipes.optimizer import OptimizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig
from recipes.schedule import ScheduleConfig

MODEL = LlamaConfig(num_layers=2, width=32, num_heads=4, num_kv_heads=2, feed_forward_width=48)
STEPS = 16


def write_text(folder: Path) -> Path:
    """Eight short files of words: 33 samples to train on, so that an epoch ends with a step of 3 of 6 samples."""
    words = random.Random(0)
    source = folder / "text"
    source.mkdir()
    for name in "abcdefgh":
        text = " ".join(words.choice(("mesh", "rank", "shard", "view", "axis")) for _ in range(14))
        (source / f"{name}.txt").write_text(text)
    return source


def small_recipe(folder: Path, **parts: dict[str, Any]) -> Recipe:
    """The recipe, writing to `folder`/out; `parts` replace fields of its parts."""
    source = folder / "text"
    text = DataConfig(
        source=str(source if source.is_dir() else write_text(folder)),
        sequence_length=16,
        cache=str(folder / "tokens"),
    )
    recipe = Recipe(
        name="small",
        model=MODEL,
        parallel=ParallelConfig(),
        data=text,
        optimizer=OptimizerConfig(lr=1e-2),
        schedule=ScheduleConfig(warmup_steps=2),
        training=TrainingConfig(steps=STEPS, global_batch=6, micro_batch=2, evaluate_every=0),
        output=OutputConfig(folder=str(folder / "out"), save_every=0),
    )
    replaced = {part: dataclasses.replace(getattr(recipe, part), **fields) for part, fields in parts.items()}
    return dataclasses.replace(recipe, **replaced)


def moved(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe going on from a copy of its output."""
    shutil.copytree(recipe.output.folder, folder)
    return dataclasses.replace(recipe, output=dataclasses.replace(recipe.output, folder=str(folder)))


def write_recipe_file(folder: Path) -> Path:
    """A user's own file that makes the recipe."""
    path = folder / "small.py"
    values = json.dumps(small_recipe(folder).to_json())
    path.write_text(
        "import json\n"
        "from recipes.structure import from_json\n\n"
        "def recipe():\n"
        f"    return from_json(json.loads({values!r}))\n"
    )
    return path
