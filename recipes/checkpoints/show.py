"""Shows what a checkpoint holds."""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.table import Table

from checkpoint import read_manifest
from recipes.checkpoints.listing import describe_layout
from recipes.checkpoints.report import Report
from recipes.from_checkpoint import find_checkpoint
from recipes.metrics import format_bytes


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
            "layout", f"{describe_layout(manifest)}; {header.world_size} rank(s), {len(manifest.files)} file(s)"
        )
        for part, sizes in parts.items():
            table.add_row(part, f"{len(sizes)} tensors, {format_bytes(sum(sizes))}")
        table.add_row("optimizer", "none" if header.optimizer is None else str(header.optimizer.get("class")))
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
