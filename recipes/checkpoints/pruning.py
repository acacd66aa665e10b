"""Removes checkpoints that need not stay."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from checkpoint import steps
from checkpoint.retention import Retention
from recipes.checkpoints.listing import folder_of_checkpoints, list_checkpoints
from recipes.checkpoints.report import Report
from recipes.checkpoints.verification import find_problems
from recipes.folder_lock import FolderLock


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of the checkpoints of a folder.

    Attributes:
        going: Those that need not stay, unread.
        kept: Those that stay, every byte of them sound.
        unusable: Folder -> what is wrong with it, a line each; these stay and do not count as kept.
    """

    going: list[Path]
    kept: list[Path]
    unusable: dict[Path, list[str]]


def plan(folder: Path, retention: Retention) -> Plan:
    """Reads what would stay, and goes further back for each that is damaged.

    Args:
        folder: A folder of checkpoints.
        retention: Which of the sound ones stay.
    """
    with warnings.catch_warnings():
        # The plan tells of those that are skipped.
        warnings.simplefilter("ignore")
        usable = [(manifest.header.step, path) for path, manifest in steps.newest_first(folder)]
    unusable = {Path(each.path): each.problem.splitlines() for each in list_checkpoints(folder) if each.problem}
    sound: set[Path] = set()
    while True:
        going = retention.superfluous(usable)
        kept = [path for _, path in usable if path not in going]
        unread = [path for path in kept if path not in sound]
        if not unread:
            return Plan(going=going, kept=kept, unusable=unusable)
        problems = find_problems(unread)
        unusable |= {path: found for path, found in problems.items() if found}
        sound |= {path for path, found in problems.items() if not found}
        usable = [(step, path) for step, path in usable if path not in unusable]


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Removes complete checkpoints that need not stay; first reads those that stay and checks every byte of them.

    One that is damaged or not complete stays, is named, and does not count: an older one stays in its place.

    Attributes:
        folder: Folder of checkpoints or of a run; of a run that is going on it is refused.
        keep: The newest sound ones that stay.
        keep_every: Steps that are multiples of this stay too; 0: none.
        dry_run: Say what would go, and remove nothing.
        json: Print JSON.
        debug: Show the traceback of an error.
    """

    folder: Annotated[str, tyro.conf.Positional]
    keep: int
    keep_every: int = 0
    dry_run: bool = False
    json: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a number is out of its range.
        """
        if self.keep < 1:
            raise ValueError(
                f"keep={self.keep} must be at least 1: prune leaves a run what it can go on from; to drop all "
                "checkpoints, remove their folder"
            )
        if self.keep_every < 0:
            raise ValueError(f"keep_every={self.keep_every} must be at least 0, which is for none")

    def run(self) -> Report:
        """Reads, and removes."""
        folder = folder_of_checkpoints(self.folder)
        retention = Retention(last=self.keep, every=self.keep_every or None)
        # A run locks the folder that holds that of its checkpoints, by whatever name this one was given.
        own = folder.resolve()
        lock = FolderLock(str(own.parent if own.name == "checkpoints" else own))
        with nullcontext() if self.dry_run else lock:
            found = plan(folder, retention)
            for path in [] if self.dry_run else found.going:
                steps.remove(path)
        what = "would remove" if self.dry_run else "removed"
        shown = [f"{what} {path}" for path in found.going]
        shown += [f"{path}: UNUSABLE, stays and does not count" for path in found.unusable]
        shown += [line for lines in found.unusable.values() for line in lines]
        values = {
            "removed": [str(path) for path in found.going],
            "kept": [str(path) for path in found.kept],
            "unusable": [{"path": str(path), "problems": lines} for path, lines in found.unusable.items()],
            "dry_run": self.dry_run,
        }
        return Report(values=values, shown=[*shown, f"{len(found.kept)} sound checkpoint(s) stay"])
