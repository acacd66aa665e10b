"""The step folders of a run: how one appears, is found, replaces another, and goes."""

import os
import re
import secrets
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from checkpoint import filesystem
from checkpoint.files import read_manifest
from checkpoint.manifest import Manifest
from checkpoint.retention import PROTECTED_NAME, Retention, is_protected
from checkpoint.verify import verify

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
        OSError: If the folder cannot be written, or the step is there and protected.
    """
    filesystem.make_folders(folder)
    for path in _named(folder, TEMPORARY_NAME):
        filesystem.remove_tree(path)
    for path in _named(folder, REPLACED_NAME):
        _settle(path)
    target = folder / step_name(step)
    if is_protected(target):
        raise FileExistsError(f"{target} is protected; remove its file {PROTECTED_NAME!r} to have it replaced")
    temporary = _hidden(target, "tmp")
    filesystem.make_folder(temporary)
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
    # No call replaces a folder that holds files. Between these two renames readers find `replaced`.
    renames = [(temporary, target)] if replaced is None else [(target, replaced), (temporary, target)]
    done: list[tuple[Path, Path]] = []
    try:
        for source, name in renames:
            filesystem.rename(source, name)
            done.append((source, name))
        filesystem.sync_folder(target.parent)
    except OSError:
        with suppress(OSError):
            for source, name in reversed(done):
                filesystem.rename(name, source)
        raise
    if replaced is not None:
        # The new one is there, and the next save removes what stays of the old one.
        with suppress(OSError):
            filesystem.remove_tree(replaced)
    return target


def discard(temporary: Path) -> None:
    """Removes a hidden folder as far as that is possible; the next save removes what stays."""
    with suppress(OSError):
        filesystem.remove_tree(temporary)


def prune(folder: Path, retention: Retention, written: Path) -> None:
    """Removes complete checkpoints that need not stay; anything else in the folder is left alone.

    Complete is one whose manifest is sound and whose files are there with their sizes; no data are read for this, so
    that bytes that have changed since are not found. `recipes.checkpoints prune` reads all that is to stay.

    Args:
        folder: Where the run keeps its checkpoints.
        retention: Which ones stay.
        written: The one just written, which stays even where others have higher steps.

    Raises:
        OSError: If one cannot be removed.
    """
    complete = [(manifest.header.step, path) for path, manifest in newest_first(folder)]
    for path in retention.superfluous(complete):
        if path != written:
            remove(path)


def remove(path: Path) -> None:
    """Removes the checkpoint of one step.

    Args:
        path: Its folder.

    Raises:
        OSError: If it cannot be removed.
    """
    # It loses its name before its first file, so that at no time an incomplete one has a name.
    hidden = _hidden(path, "tmp")
    filesystem.rename(path, hidden)
    filesystem.sync_folder(path.parent)
    filesystem.remove_tree(hidden)


def latest(folder: str | os.PathLike[str], *, thorough: bool = True) -> Path | None:
    """The undamaged checkpoint with the highest step; a warning tells of each that is skipped.

    Args:
        folder: Where a run keeps its checkpoints; need not exist.
        thorough: Read all of it and check every byte. False: only that its manifest is sound and its files are there
            with their sizes, which suits `load`: that checks what it reads, and goes back to an earlier one by itself.

    Returns:
        Its folder, None if there is none.
    """
    for path, _ in newest_first(Path(folder)):
        try:
            if thorough:
                verify(path)
        except (ValueError, OSError) as error:
            warn_of_skipped("a damaged checkpoint", error)
        else:
            return path
    return None


def newest_first(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """Complete checkpoints from the highest step downwards; a warning tells of each that is skipped.

    Args:
        folder: Where a run keeps its checkpoints; need not exist.
    """
    for _, paths in by_step(folder):
        for path in paths:
            try:
                manifest = read_manifest(path)
            except (ValueError, OSError) as error:
                warn_of_skipped("an incomplete or renamed checkpoint", error)
            else:
                yield path, manifest
                break


def by_step(folder: Path) -> list[tuple[int, list[Path]]]:
    """Steps from the highest downwards, each with the folders that are named after it, the one to prefer first.

    Args:
        folder: Where a run keeps its checkpoints; need not exist.
    """
    found: dict[int, list[Path]] = {}
    # A replaced one comes after the one with the name proper.
    for pattern in (STEP_NAME, REPLACED_NAME):
        for path in _named(folder, pattern) if folder.is_dir() else ():
            match = pattern.fullmatch(path.name)
            if match:
                found.setdefault(int(match[1]), []).append(path)
    return sorted(found.items(), reverse=True)


def warn_of_skipped(what: str, error: Exception) -> None:
    """Tells of a checkpoint that does not count.

    Args:
        what: What it is, in words.
        error: What is wrong with it.
    """
    # Always from this line: Python shows what one line says again only once.
    warnings.warn(f"skipping {what}: {error}", stacklevel=1)


def _settle(replaced: Path) -> None:
    """Ends a replacement that a crash cut short: the old one goes if the new one is there, else comes back."""
    target = replaced.parent / replaced.name.removeprefix(".").partition(".")[0]
    if target.exists():
        filesystem.remove_tree(replaced)
    else:
        filesystem.rename(replaced, target)
        filesystem.sync_folder(target.parent)


def _hidden(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{secrets.token_hex(4)}")


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )
