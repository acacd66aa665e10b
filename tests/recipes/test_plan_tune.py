"""Plans that are measured on this machine, and recipes of plans that train here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.planner.candidate import Request
from parallel.planner.ranking import Plan
from parallel.planner.search import search
from recipes.compare.job import Outcome
from recipes.plan import tune as tuning
from recipes.plan.models import find_shape
from recipes.plan.this_machine import measure_machine
from tests.parallel.planner.requests import PROCESSOR


@pytest.fixture
def plans() -> tuple[Plan, ...]:
    request = Request(
        shape=find_shape("debug"),
        gpu=PROCESSOR,
        num_gpus=2,
        sequence_length=64,
        global_batch=8,
        compile=False,
        compute="stored",
    )
    return search(request, most=3).plans


def test_the_pick_is_by_measurement_which_is_remembered_while_a_failure_runs_again(
    plans: tuple[Plan, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([3.0, 1.0, None, 2.0])
    calls = []

    def run_job(function: object, *args: object, num_processes: int, limit_s: float) -> Outcome:
        calls.append(num_processes)
        step_s = next(times)
        failure = "out of memory" if step_s is None else None
        return Outcome(value=(step_s, 5), failure=failure, warnings=(), time_s=1.0)

    monkeypatch.setattr(tuning, "run_job", run_job)
    file = tmp_path / "new" / "tuned.json"
    measured = tuning.tune("debug", plans, 3, file)
    assert [each.step_s for each in measured] == [1.0, 3.0, None]
    assert [each.plan for each in measured] == [plans[1], plans[0], plans[2]]
    assert measured[-1].failure == "out of memory"
    again = tuning.tune("debug", plans, 3, file)
    assert [(each.step_s, each.remembered) for each in again] == [(1.0, True), (2.0, False), (3.0, True)]
    assert [each.failure for each in again] == [None] * 3
    assert calls == [2, 2, 2, 2]
    third = tuning.tune("debug", plans, 3, file)
    assert [(each.step_s, each.remembered) for each in third] == [(1.0, True), (2.0, True), (3.0, True)]


def test_a_failure_in_the_file_is_measured_again(
    plans: tuple[Plan, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(value=(2.0, 5), failure=None, warnings=(), time_s=1.0)
    monkeypatch.setattr(tuning, "run_job", lambda *args, **options: outcome)
    file = tmp_path / "tuned.json"
    tuning.tune("debug", plans[:1], 3, file)
    failed = {key: {"step_s": None, "peak_bytes": None} for key in json.loads(file.read_text())}
    file.write_text(json.dumps(failed))
    (measured,) = tuning.tune("debug", plans[:1], 3, file)
    assert (measured.step_s, measured.remembered) == (2.0, False)


@pytest.mark.parametrize("text", ["no json", "[1]", '{"a": {}}', '{"a": 1}'])
def test_a_damaged_memory_is_named(plans: tuple[Plan, ...], text: str, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"tuned.json.* remove it"):
        tuning.tune("debug", plans, 3, file)


def test_ranks_of_this_machine_are_measured() -> None:
    gpu = measure_machine(1)
    assert gpu.device == "cpu"
    assert gpu.peak_tflops["float32"] > 1e-4
    assert gpu.memory_gb_per_s > 0.1


def run(folder: Path, *words: str) -> str:
    """Runs a command in a folder, where it starts ranks of its own; what it prints."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_tuning_runs_plans_here_and_the_recipe_of_the_pick_trains_unchanged(tmp_path: Path) -> None:
    words = ["recipes.plan", "debug", "--gpus", "2", "--gpu", "cpu", "--seq", "64", "--global-batch", "8"]
    printed = run(tmp_path, *words, "--tune", "2", "--write", "planned.py", "--json")
    measured = json.loads(printed)["measured"]
    assert len(measured) == 2
    assert all(each["step_s"] > 0 and each["predicted_step_s"] > 0 for each in measured)
    assert measured[0]["step_s"] <= measured[1]["step_s"]
    assert len(json.loads((tmp_path / "runs" / "plan" / "tuned.json").read_text())) == 2
    run(tmp_path, "recipes.train", "planned.py", "--nproc", "2", "--training.stop-at", "2")
    assert (tmp_path / "runs" / "debug" / "metrics.jsonl").is_file()
