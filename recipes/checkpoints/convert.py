"""Divides checkpoints over other files, and converts them from and to Hugging Face folders."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from checkpoint.hub.save import DEFAULT_FILE_BYTES
from checkpoint.manifest import Header
from checkpoint.offline import Source, file_count, total_bytes, write_checkpoint
from checkpoint.sources import CheckpointSource, OtherRanksSource
from recipes.checkpoints.listing import folder_of_checkpoints
from recipes.checkpoints.report import Report, progress
from recipes.export import export_hub, model_source
from recipes.from_checkpoint import find_checkpoint
from recipes.hub import hub_source


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """Divides a checkpoint over another number of files, as that many ranks would have saved it under fully_shard.

    Any layout loads any checkpoint: this is for fewer or smaller files, or for reading near to where ranks will be. A
    few MiB are in memory at a time.

    Attributes:
        checkpoint: A checkpoint, or a folder of them or of a run, of which the newest is taken.
        folder: Another folder, in which the step appears.
        files: How many files; default: one for each GiB.
        json: Print JSON.
        debug: Show the traceback of an error.
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    folder: Annotated[str, tyro.conf.Positional]
    files: int | None = None
    json: bool = False
    debug: bool = False

    def run(self) -> Report:
        """Reads and writes all of it."""
        found = Path(find_checkpoint(self.checkpoint))
        # In the folder of its run it would stand beside those that `ls` shows there.
        there = Path(self.folder).is_dir() and folder_of_checkpoints(self.folder).resolve() == found.parent.resolve()
        if there:
            raise ValueError(f"{self.folder} is where {found.name} comes from; name another folder")
        source = CheckpointSource(found)
        other = OtherRanksSource(source, file_count(source, self.files))
        return _written(self.folder, other, source.header, file_count(source, self.files), "reshard")


@dataclass(frozen=True, kw_only=True)
class ImportHf:
    """Makes a checkpoint of step 0, in float32 and with a recipe, of a Hugging Face folder.

    `recipes.generate`, `recipes.evaluate` and `training.init_from` take such a folder directly, too.

    Attributes:
        source: The folder: config.json and .safetensors files.
        folder: Where the checkpoint appears.
        files: How many files; default: one for each GiB.
        json: Print JSON.
        debug: Show the traceback of an error.
    """

    source: Annotated[str, tyro.conf.Positional]
    folder: Annotated[str, tyro.conf.Positional]
    files: int | None = None
    json: bool = False
    debug: bool = False

    def run(self) -> Report:
        """Reads and writes all of it."""
        source, recipe = hub_source(self.source)
        header = Header(step=0, num_tokens=0, world_size=1, recipe=recipe.to_json())
        return _written(self.folder, source, header, file_count(source, self.files), "import")


@dataclass(frozen=True, kw_only=True)
class ExportHf:
    """Makes a folder that `transformers` loads of a checkpoint; adapters are merged into what they adapt.

    Attributes:
        checkpoint: A checkpoint, or a folder of them or of a run, of which the newest is taken.
        folder: The new folder.
        dtype: Type of the values; default: as the checkpoint has them.
        max_file_bytes: Most bytes of values in one file; more files get an index.
        json: Print JSON.
        debug: Show the traceback of an error.
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    folder: Annotated[str, tyro.conf.Positional]
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_file_bytes: int = DEFAULT_FILE_BYTES
    json: bool = False
    debug: bool = False

    def run(self) -> Report:
        """Reads and writes all of the model."""
        found = find_checkpoint(self.checkpoint)
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        model = sum(each.nbytes for each in _parameters(model_source(found)))
        with progress("export", model) as advance:
            path = export_hub(found, self.folder, dtype=dtype, max_file_bytes=self.max_file_bytes, progress=advance)
        files = sorted(each.name for each in path.iterdir())
        return Report(values={"path": str(path), "files": files}, shown=[f"wrote {path}: {', '.join(files)}"])


def _parameters(source: Source) -> list[torch.Tensor]:
    return [
        torch.empty(shape, dtype=dtype, device="meta")
        for name, (dtype, shape) in source.tensors.items()
        if name.startswith("model.")
    ]


def _written(folder: str, source: Source, header: Header, num_files: int, what: str) -> Report:
    with progress(what, total_bytes(source)) as advance:
        path = write_checkpoint(folder, source, header, num_files=num_files, progress=advance)
    num_bytes = sum(os.path.getsize(each) for each in Path(path).iterdir())
    values = {"path": str(path), "num_bytes": num_bytes, "num_files": num_files}
    return Report(values=values, shown=[f"wrote {path}: {num_files} file(s), {num_bytes:,} bytes"])
