"""Ranks that start from nothing know what a user's recipe file defines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.launchers import tasks_of_node
from recipes.train import train
from recipes.user_files import import_user_file, imported_user_files
from tests.ranks import run_ranks
from tests.recipes.small_recipe import small_recipe

ROOT = Path(__file__).parents[2]

RECIPE = """
import dataclasses
from pathlib import Path
from parallel.activation_checkpoint import POLICIES
from tests.recipes.small_recipe import small_recipe

POLICIES["of my own"] = lambda: lambda op, arguments: False


def recipe():
    return small_recipe(
        Path(__file__).parent,
        training={"steps": 2},
        parallel={"activation_checkpointing": "selective", "activation_checkpoint_policy": "of my own"},
    )
"""

SPAWNED = """
import recipes.launch
import recipes.train

recipes.launch._start_method = lambda: "spawn"
if __name__ == "__main__":
    recipes.train.main(["RECIPE", "--nproc", "2"])
"""


def test_a_policy_of_a_recipe_file_is_known_to_spawned_ranks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "run.py").write_text(SPAWNED.replace("RECIPE", str(tmp_path / "mine.py")))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py")],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_file_is_imported_under_a_name_that_python_finds_again(tmp_path: Path) -> None:
    (tmp_path / "some_recipe.py").write_text("class Kept:\n    pass\n")
    module = import_user_file(tmp_path / "some_recipe.py")
    assert sys.modules[module.Kept.__module__] is module
    assert str(tmp_path / "some_recipe.py") in imported_user_files()


@pytest.mark.parametrize(
    ("counts", "node", "tasks"),
    [("4", 0, 4), ("4", 3, 4), ("4(x2)", 1, 4), ("2,1", 0, 2), ("2,1", 1, 1), ("4(x2),3", 2, 3)],
)
def test_the_tasks_of_a_node_follow_from_sruns_list(counts: str, node: int, tasks: int) -> None:
    assert tasks_of_node(counts, node) == tasks


def test_a_step_whose_gradients_are_not_finite_changes_nothing(tmp_path: Path) -> None:
    small_recipe(tmp_path)  # writes the text
    for records in run_ranks(2, train_at_an_absurd_rate, str(tmp_path))[:1]:
        steps = [each for each in records if each["kind"] == "step"]
        assert not steps[0]["skipped"]
        assert steps[-1]["skipped"]
        assert steps[-1]["gradient_norm"] is None
        assert len(steps) == 4


def train_at_an_absurd_rate(folder: str) -> list[dict[str, object]]:
    recipe = small_recipe(Path(folder), training={"steps": 4}, optimizer={"lr": 1e30}, schedule={"warmup_steps": 0})
    train(recipe)
    return [json.loads(line) for line in recipe.output.metrics.read_text().splitlines()]
