"""A run's hold on its folder says in words what is in its way."""

import shutil
from pathlib import Path

import pytest

from recipes.folder_lock import LOCK_NAME, FolderLock


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError, match="is a file, or lies in one; name another"), FolderLock(str(folder)):
            pass


def test_a_lock_that_cannot_be_made_says_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).mkdir()
    message = r"takes no file \.lock, which keeps other runs out \(Is a directory\); make it writable"
    with pytest.raises(OSError, match=message), FolderLock(str(tmp_path)):
        pass


def test_a_folder_that_vanishes_meanwhile_is_named(tmp_path: Path) -> None:
    with FolderLock(str(tmp_path / "run")) as lock:
        lock.check()
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(OSError, match=r"run' or its \.lock is gone; leave it alone while a run goes on"):
            lock.check()
