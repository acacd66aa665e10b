"""Checkpoints of any layout, written by one process."""

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint import ShardReader, files, shard_file, strict_json
from checkpoint.boxes import Box
from checkpoint.layout import Layout, replicated
from checkpoint.manifest import Header, Manifest, file_name, sign
from checkpoint.owners import Owners, StoredTensor

MESH = (("dp_replicate", 2), ("fsdp", 2), ("tp", 2))
LAYOUTS = {
    "embed": Layout(MESH, (("tp", 0), ("fsdp", 0))),
    "up": Layout(MESH, (("fsdp", 0), ("tp", 1))),
    "norm": Layout(MESH, (("fsdp", 0),)),
    "low": Layout(MESH, (("fsdp", 0),)),
    "stage": Layout((("stage", 2), ("tp", 4)), (("tp", 0),), (("stage", 1),)),
    "step": replicated(8),
    "flags": replicated(8),
}


def values() -> dict[str, Tensor]:
    """Whole tensors: dims that do not divide, a scalar, several dtypes, one without values."""
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(11, 6, generator=generator),
        "up": torch.randn(7, 5, 3, generator=generator, dtype=torch.float64),
        "norm": torch.randn(3, generator=generator).bfloat16(),
        "low": torch.empty(0, 4),
        "stage": torch.randn(9, 2, generator=generator),
        "step": torch.tensor(7.0),
        "flags": torch.randn(40, generator=generator) > 0,
    }


def part(tensor: Tensor, box: Box) -> Tensor:
    """The values of a box."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]


def write_folder(
    path: Path,
    tensors: Mapping[str, Tensor] | None = None,
    layouts: Mapping[str, Layout] = LAYOUTS,
    *,
    block_bytes: int = 32,
    step: int = 42,
) -> Path:
    """Writes what the ranks of the layouts would have written."""
    tensors = values() if tensors is None else tensors
    path.mkdir(parents=True)
    stored = {
        name: StoredTensor(dtype=each.dtype, shape=tuple(each.shape), layout=layouts[name])
        for name, each in tensors.items()
    }
    owners, written = Owners(stored), {}
    world_size = prod(size for _, size in next(iter(layouts.values())).mesh)
    for rank in range(world_size):
        pieces = owners.of_rank(rank)
        if pieces:
            entries = {
                piece.key(stored[piece.name].shape): (stored[piece.name].dtype, piece.box.sizes) for piece in pieces
            }
            rows = [[part(tensors[piece.name], piece.box)] for piece in pieces]
            written[file_name(rank)] = shard_file.write(path / file_name(rank), entries, rows, block_bytes)
    header = Header(step=step, num_tokens=0, world_size=world_size)
    files.write_manifest(path, Manifest(header=header, tensors=stored, files=written, block_bytes=block_bytes))
    return path


def wrong(path: Path, tensors: Mapping[str, Tensor] | None = None) -> list[str]:
    """Names of tensors that do not come back as they were."""
    reader = ShardReader(path)
    tensors = values() if tensors is None else tensors
    return [name for name, each in tensors.items() if not torch.equal(reader.read(name), each)]


def rewrite(path: Path, change: Callable[[Any], Any]) -> Path:
    """Changes a manifest and gives it the right digest."""
    manifest: Any = strict_json.loads((path / "manifest.json").read_text(), "test")
    del manifest["digest"]
    change(manifest)
    (path / "manifest.json").write_text(sign(manifest))
    return path


def copy(path: Path, target: Path) -> Path:
    """The same checkpoint elsewhere."""
    target.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(path):
        (target / name).write_bytes((path / name).read_bytes())
    return target
