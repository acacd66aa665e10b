"""A load finds the newest checkpoint that can be read, and says in words what is in its way."""

import errno
import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from checkpoint import Retention, files, latest, load, save, verified_file
from checkpoint.files import open_plain
from tests.checkpoint import states
from tests.ranks import run_ranks


@pytest.fixture
def two(tmp_path: Path) -> Path:
    for seed in (0, 1):
        save(tmp_path, states.fill(states.new_state(), seed))
    return tmp_path


def unreadable(name: str) -> Any:
    """Makes the disk refuse a file of the newest checkpoint."""

    def opened(path: Path) -> tuple[int, int]:
        if path.parent.name == "step-00000043" and path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open_plain(path)

    return opened


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.digests", "rank-00000.safetensors"])
def test_a_file_that_cannot_be_read_sends_a_load_to_the_checkpoint_before(two: Path, name: str) -> None:
    state = states.new_state()
    module = files if name == "manifest.json" else verified_file
    with (
        patch.object(module, "open_plain", unreadable(name)),
        pytest.warns(UserWarning, match=rf"Input/output error.*step-00000043/{name}"),
    ):
        load(two, state)
    assert state.step == 42 and states.wrong_tensors(state) == []
    with patch.object(module, "open_plain", unreadable(name)), pytest.raises(OSError, match="Input/output error"):
        load(two / "step-00000043", states.new_state())


def test_where_no_other_checkpoint_can_be_read_the_error_is_the_disk_s(two: Path) -> None:
    def opened(path: Path) -> tuple[int, int]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with (
        patch.object(verified_file, "open_plain", opened),
        pytest.warns(UserWarning, match="going back"),
        pytest.raises(OSError, match=r"holds no other complete checkpoint: .*Input/output error"),
    ):
        load(two, states.new_state())


def save_two(folder: Path) -> None:
    states.forget_meshes()
    for seed in (0, 1):
        save(folder, states.fill(states.new_state("fsdp 2"), seed))


def load_where_one_rank_cannot_read(folder: Path) -> tuple[int, list[str]]:
    states.forget_meshes()
    state = states.new_state("fsdp 2")
    name = "rank-00001.safetensors" if dist.get_rank() == 1 else "none"
    with (
        patch.object(verified_file, "open_plain", unreadable(name)),
        pytest.warns(UserWarning, match="rank 1: .*Input/output error.*; going back to the checkpoint before it"),
    ):
        load(folder, state)
    return state.step, states.wrong_tensors(state)


def test_all_ranks_go_back_where_one_cannot_read(tmp_path: Path) -> None:
    run_ranks(2, save_two, tmp_path)
    assert run_ranks(2, load_where_one_rank_cannot_read, tmp_path) == [(42, []), (42, [])]


def test_one_damaged_checkpoint_is_told_of_once_and_does_not_count(two: Path) -> None:
    os.truncate(two / "step-00000043" / "rank-00000.safetensors", 1000)
    with warnings.catch_warnings(record=True) as caught:
        # As Python does without tests.
        warnings.simplefilter("default")
        assert latest(two) == latest(two, thorough=False) == two / "step-00000042"
        load(two, states.new_state())
        # Of the others one stays beside the new one: what is damaged takes nobody's place.
        save(two, states.fill(states.new_state(), 2), Retention(last=2))
    assert [str(each.message).startswith("skipping") for each in caught] == [True]
    assert sorted(os.listdir(two)) == ["step-00000042", "step-00000043", "step-00000044"]


@pytest.mark.parametrize(("what", "message"), [("a file", "is not a folder, but a file"), ("nothing", "not a folder")])
def test_what_is_no_folder_is_named_on_load(tmp_path: Path, what: str, message: str) -> None:
    path = tmp_path / "run"
    if what == "a file":
        path.write_text("root:x:0:0")
    with pytest.raises(ValueError, match=f"there is no checkpoint: .*{message}"):
        load(path, states.new_state())
    if what == "a file":
        for folder in (path, path / "checkpoints"):
            with pytest.raises(OSError, match=r"run is a file; name another folder|Not a directory"):
                save(folder, states.fill(states.new_state()))
        assert path.read_text() == "root:x:0:0"


def test_a_folder_that_vanished_is_made_again_by_the_next_save(two: Path) -> None:
    state = states.fill(states.new_state(), 2)
    for path in sorted(two.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    two.rmdir()
    with pytest.raises(ValueError, match="there is no checkpoint"):
        load(two, states.new_state())
    assert save(two, state) == latest(two)


def test_a_read_only_folder_is_one_error_and_the_previous_checkpoint_stands(two: Path) -> None:
    """Root writes anywhere, so that the refusal is the system call's."""
    denied = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with patch.object(os, "mkdir", side_effect=denied), pytest.raises(OSError, match=r"could not save .*Read-only"):
        save(two, states.fill(states.new_state(), 2))
    assert sorted(os.listdir(two)) == ["step-00000042", "step-00000043"]
    state = states.new_state()
    load(two, state)
    assert state.step == 43 and states.wrong_tensors(state, 1) == []
