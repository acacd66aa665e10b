"""Lists the checkpoints of a folder."""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from checkpoint import Manifest, read_manifest
from checkpoint.manifest import MANIFEST_NAME
from checkpoint.retention import is_protected
from checkpoint.steps import REPLACED_NAME, STEP_NAME, TEMPORARY_NAME
from recipes.checkpoints.report import Report
from recipes.metrics import format_bytes


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One folder among checkpoints.

    Attributes:
        path: The folder.
        step: The step that its name tells.
        num_bytes: Bytes of its files.
        layout: The degrees of the mesh that wrote it; None: not known.
        complete: Whether it is a complete checkpoint, its values unread.
        protected: Whether a user has protected it.
        age_s: Seconds since it was written.
        problem: Why it is not complete.
    """

    path: str
    step: int
    num_bytes: int
    layout: str | None
    complete: bool
    protected: bool
    age_s: float
    problem: str | None = None


def folder_of_checkpoints(path: str) -> Path:
    """The folder of checkpoints that a path means, which may be that of a run.

    Raises:
        ValueError: If there is none.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{path!r} is a file, not a folder" if folder.exists() else f"there is no folder {path!r}")
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


def list_checkpoints(folder: Path) -> list[Listed]:
    """All that is a checkpoint or the remains of one, by step.

    Args:
        folder: A folder of checkpoints.
    """
    found: list[Listed] = []
    for entry in folder.iterdir():
        is_known = any(pattern.fullmatch(entry.name) for pattern in (STEP_NAME, REPLACED_NAME, TEMPORARY_NAME))
        if is_known and entry.is_dir() and not entry.is_symlink():
            found.append(_listed(entry))
    return sorted(found, key=lambda each: (each.step, each.path))


def _listed(path: Path) -> Listed:
    manifest: Manifest | None = None
    problem = "not complete when its saving ended" if TEMPORARY_NAME.fullmatch(path.name) else None
    if problem is None:
        try:
            manifest = read_manifest(path)
        except (ValueError, OSError) as error:
            problem = str(error)
    sizes = [each.stat() for each in os.scandir(path) if each.is_file(follow_symlinks=False)]
    written = path / MANIFEST_NAME if manifest else path
    return Listed(
        path=str(path),
        step=int(path.name.lstrip(".").removeprefix("step-").partition(".")[0]),
        num_bytes=sum(each.st_size for each in sizes),
        layout=None if manifest is None else describe_layout(manifest),
        complete=manifest is not None,
        protected=is_protected(path),
        age_s=max(0.0, time.time() - written.stat().st_mtime),
        problem=problem,
    )


def describe_layout(manifest: Manifest) -> str:
    """The degrees of the mesh that wrote a checkpoint, in words."""
    layout, size = manifest.header.layout, manifest.header.world_size
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    degrees = [f"{axis} {layout[axis]}" for axis in axes if isinstance(layout.get(axis), int) and layout[axis] > 1]
    if not layout:
        return f"{size} file(s), converted"
    return f"{layout.get('data_parallel', '?')}, {' x '.join(degrees) or '1 rank'}"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True, kw_only=True)
class Ls:
    """Lists the checkpoints of a run, and what is left of those that never became complete.

    Attributes:
        folder: Folder of checkpoints or of a run.
        json: Print JSON.
        debug: Show the traceback of an error.
    """

    folder: Annotated[str, tyro.conf.Positional]
    json: bool = False
    debug: bool = False

    def run(self) -> Report:
        """Reads the manifests."""
        found = list_checkpoints(folder_of_checkpoints(self.folder))
        table = Table("step", "size", "layout", "complete", "age", "folder")
        for each in found:
            complete = "yes, protected" if each.protected and each.complete else "yes" if each.complete else "NO"
            size, age = format_bytes(each.num_bytes), _age(each.age_s)
            table.add_row(str(each.step), size, each.layout or "", complete, age, Path(each.path).name)
        problems = [f"{each.path}: {each.problem}" for each in found if each.problem]
        return Report(values=[asdict(each) for each in found], shown=[table, *problems])
