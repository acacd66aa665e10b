"""The step folders of a run: how one appears, is found, replaces another, and goes."""

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from checkpoint.files import read_manifest, sync_folder
from checkpoint.manifest import Manifest

STEP_NAME = re.compile(r"step-(\d{8,18})")
TEMPORARY_NAME = re.compile(r"\.step-\d{8,18}\.tmp-[0-9a-f]{8}")
"""Folders that never were complete, or that are on their way out."""
REPLACED_NAME = re.compile(r"\.step-(\d{8,18})\.old-[0-9a-f]{8}")
"""Complete checkpoints that a new one of the same step is about to replace."""


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:08d}"


def prepare(folder: Path, step: int) -> Path:
    """Cleans up after earlier crashes and makes a hidden folder to write a step into.

    Args:
        folder: Where the run keeps its checkpoints; made if it is not there.
        step: The step to be written.

    Returns:
        The hidden folder, empty.

    Raises:
        OSError: If the folder cannot be written.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
    for path in _named(folder, TEMPORARY_NAME):
        shutil.rmtree(path)
    for path in _named(folder, REPLACED_NAME):
        _settle(path)
    temporary = _hidden(folder / step_name(step), "tmp")
    temporary.mkdir()
    return temporary


def publish(temporary: Path, step: int) -> Path:
    """Gives a complete hidden folder its name, at once; one of the same step makes room only now.

    Args:
        temporary: From `prepare`; all in it is on disk.
        step: Its step.

    Returns:
        Where it is now.

    Raises:
        OSError: If it cannot be renamed; what stood there before then stands again.
    """
    target = temporary.parent / step_name(step)
    replaced = _hidden(target, "old") if target.exists() else None
    if replaced is not None:
        # No call replaces a folder that holds files. Between these two renames readers find `replaced`.
        target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        if replaced is not None:
            replaced.rename(target)
        raise
    sync_folder(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced)
    return target


def discard(temporary: Path) -> None:
    """Removes a hidden folder as far as that is possible; the next save removes what stays."""
    shutil.rmtree(temporary, ignore_errors=True)


def prune(folder: Path, keep: int, written: Path) -> None:
    """Removes all complete checkpoints but the newest ones; anything else in the folder is left alone.

    Args:
        folder: Where the run keeps its checkpoints.
        keep: How many to keep, at least 1.
        written: The one just written, which stays even where others have higher steps.

    Raises:
        OSError: If one cannot be removed.
    """
    complete = [path for path, _ in newest_first(folder)]
    for path in complete[keep:]:
        if path != written:
            hidden = _hidden(path, "tmp")
            path.rename(hidden)
            sync_folder(folder)
            shutil.rmtree(hidden)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step.

    Args:
        folder: Where a run keeps its checkpoints; need not exist.

    Returns:
        Its folder, None if there is none.
    """
    return next((path for path, _ in newest_first(Path(folder))), None)


def newest_first(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """Complete checkpoints from the highest step downwards; a warning tells of each that is skipped.

    Args:
        folder: Where a run keeps its checkpoints; need not exist.
    """
    if not folder.is_dir():
        return
    found: dict[int, list[Path]] = {}
    # A replaced one comes after the one with the name proper.
    for pattern in (STEP_NAME, REPLACED_NAME):
        for path in _named(folder, pattern):
            match = pattern.fullmatch(path.name)
            if match:
                found.setdefault(int(match[1]), []).append(path)
    for step in sorted(found, reverse=True):
        for path in found[step]:
            try:
                manifest = read_manifest(path)
            except (ValueError, OSError) as error:
                warnings.warn(f"skipping an incomplete or renamed checkpoint: {error}", stacklevel=2)
            else:
                yield path, manifest
                break


def _settle(replaced: Path) -> None:
    """Ends a replacement that a crash cut short: the old one goes if the new one is there, else comes back."""
    target = replaced.parent / replaced.name.removeprefix(".").partition(".")[0]
    if target.exists():
        shutil.rmtree(replaced)
    else:
        replaced.rename(target)
        sync_folder(target.parent)


def _hidden(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{secrets.token_hex(4)}")


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )
