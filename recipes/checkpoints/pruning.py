"""Removes checkpoints that need not stay."""

import warnings
from dataclasses import dataclass
from typing import Annotated

import tyro

from checkpoint import steps
from checkpoint.retention import Retention
from recipes.checkpoints.listing import folder_of_checkpoints
from recipes.checkpoints.report import Report
from recipes.folder_lock import FolderLock


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Removes complete checkpoints that need not stay, as a run does after each save.

    Attributes:
        folder: Folder of checkpoints or of a run; of a run that is going on it is refused.
        keep: The newest that stay.
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

    def run(self) -> Report:
        """Looks, and removes."""
        folder = folder_of_checkpoints(self.folder)
        retention = Retention(last=self.keep, every=self.keep_every or None)
        with warnings.catch_warnings():
            # What is not complete stays, and `ls` tells of it.
            warnings.simplefilter("ignore")
            complete = [(manifest.header.step, path) for path, manifest in steps.newest_first(folder)]
            going = retention.superfluous(complete)
            if going and not self.dry_run:
                # A run locks the folder that holds that of its checkpoints, by whatever name this one was given.
                own = folder.resolve()
                with FolderLock(str(own.parent if own.name == "checkpoints" else own)):
                    steps.prune(folder, retention, complete[0][1])
        what = "would remove" if self.dry_run else "removed"
        kept = [str(path) for _, path in complete if path not in going]
        values = {"removed": [str(path) for path in going], "kept": kept, "dry_run": self.dry_run}
        return Report(values=values, shown=[*(f"{what} {path}" for path in going), f"{len(kept)} stay"])
