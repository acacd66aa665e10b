"""Checks every byte of checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from checkpoint import verify
from checkpoint.manifest import MANIFEST_NAME
from checkpoint.steps import STEP_NAME
from recipes.checkpoints.listing import folder_of_checkpoints, list_checkpoints
from recipes.checkpoints.report import DIFFERENT, Report, progress


def find_problems(paths: Sequence[Path]) -> dict[Path, list[str]]:
    """What is wrong with checkpoints, every byte of which is read; shows how far it has come.

    Args:
        paths: Their folders.

    Returns:
        Folder -> what is wrong, a line each; nothing for a sound one.
    """
    found: dict[Path, list[str]] = {}
    total = sum(each.stat().st_size for path in paths if path.is_dir() for each in path.glob("*.safetensors"))
    with progress("verify", total) as advance:
        for path in paths:
            try:
                verify(path, advance)
                found[path] = []
            except ValueError as error:
                found[path] = str(error).splitlines()
            except OSError as error:
                found[path] = [f"{path} cannot be read: {error}"]
    return found


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
        found = find_problems(paths)
        shown = [f"{path}: {'sound' if not problems else 'DAMAGED'}" for path, problems in found.items()]
        shown += [line for problems in found.values() for line in problems]
        values = [{"path": str(path), "sound": not problems, "problems": problems} for path, problems in found.items()]
        return Report(values=values, shown=shown, exit_code=DIFFERENT if any(found.values()) else 0)
