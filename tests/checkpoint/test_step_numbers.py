"""The number of a step and the name of its folder agree."""

from pathlib import Path
from typing import Any

import pytest

from checkpoint import latest, load, read_manifest, save
from tests.checkpoint import states


@pytest.mark.parametrize("name", ["step", "num_tokens"])
@pytest.mark.parametrize("value", [-1, 10**18, True, 1.5, None, "7"])
def test_a_count_that_no_checkpoint_can_hold_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    state = states.new_state()
    setattr(state, name, value)
    with pytest.raises(ValueError, match=rf"{name}={value!r} must be an integer from 0 to below 10\*\*18"):
        save(tmp_path, state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [0, 10**8 - 1, 10**8, 10**18 - 1])
def test_every_step_that_is_saved_is_found(tmp_path: Path, step: int) -> None:
    state = states.new_state()
    state.step = step
    written = save(tmp_path, state)
    assert latest(tmp_path) == written
    fresh = states.new_state()
    load(tmp_path, fresh)
    assert fresh.step == step


def test_a_renamed_step_is_skipped_with_a_warning_and_refused_by_name(tmp_path: Path) -> None:
    previous = save(tmp_path, states.fill(states.new_state()))
    renamed = save(tmp_path, states.fill(states.new_state(), seed=1)).rename(tmp_path / "step-00000099")
    with pytest.warns(UserWarning, match="skipping.*step-00000099 holds step 43; it was renamed"):
        assert latest(tmp_path) == previous
    with pytest.raises(ValueError, match="step-00000099 holds step 43"):
        load(renamed, states.new_state())
    with pytest.raises(ValueError, match="step-00000099 holds step 43"):
        read_manifest(renamed)


def test_a_name_without_a_number_may_hold_any_step(tmp_path: Path) -> None:
    best = save(tmp_path, states.fill(states.new_state())).rename(tmp_path / "best")
    state = states.new_state()
    load(best, state)
    assert state.step == 42
