"""Lists, shows, verifies and prunes checkpoints."""

import os
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from checkpoint import Manifest, read_manifest, steps, verify
from checkpoint.manifest import MANIFEST_NAME
from checkpoint.retention import Retention, is_protected
from checkpoint.steps import REPLACED_NAME, STEP_NAME, TEMPORARY_NAME
from recipes.checkpoints.report import DIFFERENT, Report, progress
from recipes.folder_lock import FolderLock
from recipes.from_checkpoint import find_checkpoint
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
        raise ValueError(f"there is no folder {path!r}")
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
        layout=None if manifest is None else _describe_layout(manifest),
        complete=manifest is not None,
        protected=is_protected(path),
        age_s=max(0.0, time.time() - written.stat().st_mtime),
        problem=problem,
    )


def _describe_layout(manifest: Manifest) -> str:
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


@dataclass(frozen=True, kw_only=True)
class Show:
    """Shows what a checkpoint holds.

    Attributes:
        checkpoint: A checkpoint, or a folder of them or of a run, of which the newest is taken.
        tensors: List all tensors.
        json: Print JSON, with all tensors.
        debug: Show the traceback of an error.
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    tensors: bool = False
    json: bool = False
    debug: bool = False

    def run(self) -> Report:
        """Reads the manifest."""
        path = find_checkpoint(self.checkpoint)
        manifest = read_manifest(path)
        header = manifest.header
        parts: dict[str, list[int]] = {}
        for name, tensor in manifest.tensors.items():
            parts.setdefault(name.partition(".")[0], []).append(tensor.num_bytes)
        table = Table("", "", title=path, show_header=False, title_justify="left")
        table.add_row("step", f"{header.step:,}, {header.num_tokens:,} tokens")
        table.add_row(
            "layout", f"{_describe_layout(manifest)}; {header.world_size} rank(s), {len(manifest.files)} file(s)"
        )
        for part, sizes in parts.items():
            table.add_row(part, f"{len(sizes)} tensors, {format_bytes(sum(sizes))}")
        table.add_row("optimizer", "none" if header.optimizer is None else str(header.optimizer["class"]))
        table.add_row("state of", ", ".join(header.stateful) or "nothing else")
        table.add_row("recipe", str(header.recipe.get("name", "none")))
        listed = [f"{name}: {str(each.dtype)[6:]} {list(each.shape)}" for name, each in manifest.tensors.items()]
        values: dict[str, Any] = {
            "path": path,
            **vars(header),
            "files": {name: each.num_bytes for name, each in manifest.files.items()},
            "tensors": {
                name: {"dtype": str(each.dtype).removeprefix("torch."), "shape": list(each.shape)}
                for name, each in manifest.tensors.items()
            },
        }
        return Report(values=values, shown=[table, *(listed if self.tensors else [])])


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Reads checkpoints and checks every byte of them.

    Attributes:
        path: One checkpoint; or a folder of them or of a run, of which all are checked.
        json: Print JSON.
        debug: Show the traceback of an error.
    """

    path: Annotated[str, tyro.conf.Positional]
    json: bool = False
    debug: bool = False

    def run(self) -> Report:
        """Reads all files."""
        one = Path(self.path) / MANIFEST_NAME
        paths = [Path(self.path)] if one.exists() or STEP_NAME.fullmatch(Path(self.path).name) else None
        if paths is None:
            folder = folder_of_checkpoints(self.path)
            paths = [Path(each.path) for each in list_checkpoints(folder) if STEP_NAME.fullmatch(Path(each.path).name)]
        if not paths:
            raise ValueError(f"{self.path} holds no checkpoint (a folder step-<number>)")
        found: dict[str, list[str]] = {}
        total = sum(each.stat().st_size for path in paths if path.is_dir() for each in path.glob("*.safetensors"))
        with progress("verify", total) as advance:
            for path in paths:
                try:
                    verify(path, advance)
                    found[str(path)] = []
                except ValueError as error:
                    found[str(path)] = str(error).splitlines()
        shown = [f"{path}: {'sound' if not problems else 'DAMAGED'}" for path, problems in found.items()]
        shown += [line for problems in found.values() for line in problems]
        values = [{"path": path, "sound": not problems, "problems": problems} for path, problems in found.items()]
        return Report(values=values, shown=shown, exit_code=DIFFERENT if any(found.values()) else 0)


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
                with FolderLock(str(folder.parent if folder.name == "checkpoints" else folder)):
                    steps.prune(folder, retention, complete[0][1])
        what = "would remove" if self.dry_run else "removed"
        kept = [str(path) for _, path in complete if path not in going]
        values = {"removed": [str(path) for path in going], "kept": kept, "dry_run": self.dry_run}
        return Report(values=values, shown=[*(f"{what} {path}" for path in going), f"{len(kept)} stay"])
