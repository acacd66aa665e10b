"""Which checkpoints stay, and which folders nothing touches."""

import os
from pathlib import Path

import pytest

from checkpoint import Retention, TrainState, filesystem, save
from tests.checkpoint import states


@pytest.fixture(scope="module")
def state() -> TrainState:
    return states.fill(states.new_state())


def save_steps(folder: Path, state: TrainState, steps: list[int], retention: Retention | None) -> list[str]:
    for state.step in steps:
        save(folder, state, retention)
    return sorted(os.listdir(folder))


def test_all_stay_without_retention(tmp_path: Path, state: TrainState) -> None:
    assert len(save_steps(tmp_path, state, [1, 2, 3], None)) == 3


def test_the_last_ones_and_every_nth_step_stay(tmp_path: Path, state: TrainState) -> None:
    found = save_steps(tmp_path, state, list(range(1, 10)), Retention(last=2, every=3))
    assert found == [f"step-{step:08d}" for step in (3, 6, 8, 9)]


def test_a_protected_one_stays_beside_the_last_ones_and_is_not_replaced(tmp_path: Path, state: TrainState) -> None:
    save_steps(tmp_path, state, [1, 2], Retention(last=1))
    (tmp_path / "step-00000002" / "protected").touch()
    found = save_steps(tmp_path, state, [3, 4, 5], Retention(last=2))
    assert found == ["step-00000002", "step-00000004", "step-00000005"]
    with pytest.raises(OSError, match="step-00000002 is protected; remove its file 'protected'"):
        save_steps(tmp_path, state, [2], None)
    assert sorted(os.listdir(tmp_path)) == found
    (tmp_path / "step-00000002" / "protected").unlink()
    assert save_steps(tmp_path, state, [6], Retention(last=2)) == ["step-00000005", "step-00000006"]


def test_only_complete_ones_count_and_foreign_folders_stay(tmp_path: Path, state: TrainState) -> None:
    for foreign in ("step-00000099", "step-abc", "notes", ".step-00000001.tmp"):
        (tmp_path / foreign).mkdir()
        (tmp_path / foreign / "rank-00000.safetensors").touch()
    (tmp_path / "step-00000098").symlink_to(tmp_path / "notes")
    with pytest.warns(UserWarning, match="step-00000099"):
        found = save_steps(tmp_path, state, [1, 2, 3, 4, 5], Retention(last=2))
    kept = ["step-00000004", "step-00000005"]
    assert found == [".step-00000001.tmp", "notes", *kept, "step-00000098", "step-00000099", "step-abc"]


def test_the_one_just_written_stays_even_if_others_are_of_later_steps(tmp_path: Path, state: TrainState) -> None:
    assert save_steps(tmp_path, state, [5, 6, 1], Retention(last=1)) == ["step-00000001", "step-00000006"]


def test_nothing_goes_before_the_new_one_is_there(
    tmp_path: Path, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, state, [1], Retention(last=1))
    removed, remove_file = [], filesystem.remove_file

    def recorded(path: Path) -> None:
        assert (tmp_path / "step-00000002" / "manifest.json").exists()
        removed.append(path.name)
        remove_file(path)

    monkeypatch.setattr(filesystem, "remove_file", recorded)
    assert save_steps(tmp_path, state, [2], Retention(last=1)) == ["step-00000002"]
    assert "manifest.json" in removed


@pytest.mark.parametrize("values", [{"last": 0}, {"last": 1, "every": 0}])
def test_numbers_below_one_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="=0 must be at least 1"):
        Retention(**values)
