"""Whatever goes wrong in a save, the checkpoints before it stand and the next save succeeds."""

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from checkpoint import TrainState, filesystem, latest, load, save, steps
from tests.checkpoint import states
from tests.ranks import RankError, run_ranks

POINTS: dict[str, tuple[Any, str]] = {
    "making the folder": (filesystem, "make_folder"),
    "writing": (filesystem, "write"),
    "syncing the folder": (filesystem, "sync_folder"),
    "renaming": (filesystem, "rename"),
}


class CutShort(BaseException):
    """What nothing is meant to catch."""


def fail(error: BaseException, at_call: int = 1) -> Callable[..., Any]:
    """A function that raises when called for the n-th time, and does nothing before."""
    calls = []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == at_call:
            raise error

    return failing


def assert_loads(folder: Path, seed: int) -> None:
    state = states.new_state()
    load(folder, state)
    assert states.wrong_tensors(state, seed) == []
    assert state.step == 42 + seed


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), CutShort()], ids=["disk full", "cut short"])
def test_a_save_that_fails_leaves_the_previous_one_and_nothing_else(
    tmp_path: Path, point: str, error: BaseException
) -> None:
    previous = save(tmp_path, states.fill(states.new_state()))
    with patch.object(*POINTS[point], fail(error)), pytest.raises(type(error)) as raised:
        save(tmp_path, states.fill(states.new_state(), seed=1))
    if isinstance(error, OSError):
        assert isinstance(raised.value, OSError)
        assert raised.value.errno == 28
        assert str(raised.value).startswith(f"could not save {tmp_path / 'step-00000043'}: ")
        assert "No space left on device" in str(raised.value)
    assert list(tmp_path.iterdir()) == [previous]
    assert_loads(tmp_path, seed=0)
    save(tmp_path, states.fill(states.new_state(), seed=1))
    assert_loads(tmp_path, seed=1)


def test_leftovers_of_a_crash_are_not_loaded_and_go_with_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, states.fill(states.new_state()))
    with patch.object(steps, "discard"), patch.object(filesystem, "rename", fail(OSError())), pytest.raises(OSError):
        save(tmp_path, states.fill(states.new_state(), seed=1))
    (leftover,) = (path for path in tmp_path.iterdir() if path.name.startswith("."))
    assert (leftover / "manifest.json").exists()
    assert_loads(tmp_path, seed=0)
    foreign = tmp_path / ".step-notes"
    foreign.mkdir()
    save(tmp_path, states.fill(states.new_state(), seed=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-notes", "step-00000042", "step-00000044"]


def test_the_same_step_is_replaced_only_once_the_new_one_is_safe(tmp_path: Path) -> None:
    def same_step(seed: int) -> TrainState:
        state = states.fill(states.new_state(), seed)
        state.step = 42
        return state

    def loaded_seed() -> int:
        state = states.new_state()
        load(tmp_path, state)
        return state.num_tokens - 1000

    save(tmp_path, same_step(1))
    save(tmp_path, same_step(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000042"]
    assert loaded_seed() == 2
    # A crash after the first of the two renames: the old one has lost its name, and is found all the same.
    rename, calls = filesystem.rename, []

    def rename_once(path: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) > 1:
            raise CutShort
        rename(path, target)

    with patch.object(filesystem, "rename", rename_once), patch.object(steps, "discard"), pytest.raises(CutShort):
        save(tmp_path, same_step(3))
    assert not (tmp_path / "step-00000042").exists()
    assert loaded_seed() == 2
    state = states.fill(states.new_state(), seed=4)
    save(tmp_path, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000042", "step-00000046"]
    # A failing second rename, without a crash, is undone at once.
    calls.clear()

    def second_fails(path: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(path, target)

    state.num_tokens = 1005
    with patch.object(filesystem, "rename", second_fails), pytest.raises(OSError, match="Input/output"):
        save(tmp_path, state)
    assert loaded_seed() == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000042", "step-00000046"]


@pytest.mark.parametrize("damage", ["no manifest", "cut manifest", "missing file", "cut file", "link"])
def test_latest_falls_back_from_an_incomplete_checkpoint(tmp_path: Path, damage: str) -> None:
    previous = save(tmp_path, states.fill(states.new_state()))
    newest = save(tmp_path, states.fill(states.new_state(), seed=1))
    manifest, data = newest / "manifest.json", newest / "rank-00000.safetensors"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "cut manifest":
        os.truncate(manifest, 1000)
    elif damage == "missing file":
        data.unlink()
    elif damage == "cut file":
        os.truncate(data, data.stat().st_size - 1)
    else:
        data.rename(tmp_path / "elsewhere")
        data.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="skipping an incomplete or renamed checkpoint.*step-00000043"):
        assert latest(tmp_path) == previous
    with pytest.warns(UserWarning, match="skipping"):
        assert_loads(tmp_path, seed=0)
    with pytest.raises(ValueError, match="step-00000043"):
        load(newest, states.new_state())


def flip_bit(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00000.digests"])
def test_latest_and_load_go_back_from_a_checkpoint_with_a_flipped_bit(tmp_path: Path, file: str) -> None:
    previous = save(tmp_path, states.fill(states.new_state()))
    newest = save(tmp_path, states.fill(states.new_state(), seed=1))
    flip_bit(newest / file, -3)
    with pytest.warns(UserWarning, match="skipping a damaged checkpoint.*step-00000043"):
        assert latest(tmp_path) == previous
    assert latest(tmp_path, thorough=False) == newest
    with pytest.warns(UserWarning, match="step-00000043.*; going back to the checkpoint before it"):
        assert_loads(tmp_path, seed=0)
    flip_bit(previous / file, -3)
    state = states.new_state()
    with (
        pytest.warns(UserWarning, match="going back"),
        pytest.raises(ValueError, match=r"holds no other complete checkpoint: .*step-00000042"),
    ):
        load(tmp_path, state)
    assert state.step == 0


def load_where_one_rank_reads_damage(folder: Path) -> tuple[int, list[str]]:
    states.forget_meshes()
    state = states.new_state("fsdp 2")
    with pytest.warns(UserWarning, match="going back to the checkpoint before it"):
        load(folder, state)
    return state.step, states.wrong_tensors(state)


def test_all_ranks_go_back_where_one_reads_damage(tmp_path: Path) -> None:
    run_ranks(2, save_two, tmp_path)
    flip_bit(tmp_path / "step-00000043" / "rank-00001.safetensors", -3)
    assert run_ranks(2, load_where_one_rank_reads_damage, tmp_path) == [(42, []), (42, [])]


def save_two(folder: Path) -> None:
    states.forget_meshes()
    for seed in (0, 1):
        save(folder, states.fill(states.new_state("fsdp 2"), seed))


def save_with_small_files_on_rank_1(folder: Path) -> tuple[str, list[str], float]:
    states.forget_meshes()
    state = states.fill(states.new_state("fsdp 2"))
    save(folder, state)
    state.step += 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    start = time.monotonic()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(OSError) as raised:
            save(folder, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seconds = time.monotonic() - start
    # Rank 0 removes what is left, so it is the one to look.
    names = sorted(os.listdir(folder)) if dist.get_rank() == 0 else ["step-00000042"]
    # Training goes on, and can save again.
    states.step(state)
    save(folder, state)
    return str(raised.value), names, seconds


def test_an_error_of_the_file_system_on_one_rank_is_the_same_error_on_all(tmp_path: Path) -> None:
    outcomes = run_ranks(2, save_with_small_files_on_rank_1, tmp_path)
    for message, names, seconds in outcomes:
        assert "could not save" in message
        assert "rank 1: [Errno 27] File too large" in message
        assert names == ["step-00000042"]
        assert seconds < 10
    assert outcomes[0][0] == outcomes[1][0]
    assert sorted(os.listdir(tmp_path)) == ["step-00000042", "step-00000043"]


def save_into_a_file(folder: Path) -> str:
    states.forget_meshes()
    with pytest.raises(OSError) as raised:
        save(folder, states.new_state("fsdp 2"))
    return str(raised.value)


def test_a_folder_that_cannot_be_made_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_ranks(2, save_into_a_file, tmp_path / "file" / "run")
    assert first == second
    assert "file is a file; name another folder" in first


def die_in_the_second_save(folder: Path, rank: int, name: str) -> None:
    states.forget_meshes()
    state = states.fill(states.new_state("fsdp 2"))
    save(folder, state)
    state.step += 1
    if dist.get_rank() == rank:
        with patch.object(filesystem, name, lambda *args: os.kill(os.getpid(), signal.SIGKILL)):
            save(folder, state)
    save(folder, state)


@pytest.mark.parametrize(("rank", "name"), [(1, "write"), (0, "rename")])
def test_a_killed_rank_leaves_the_previous_checkpoint(tmp_path: Path, rank: int, name: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(2, die_in_the_second_save, tmp_path, rank, name)
    assert time.monotonic() - start < 20
    assert latest(tmp_path) == tmp_path / "step-00000042"
    assert_loads(tmp_path, seed=0)
    save(tmp_path, states.fill(states.new_state(), seed=1))
    assert sorted(os.listdir(tmp_path)) == ["step-00000042", "step-00000043"]
