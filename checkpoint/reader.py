"""Reads any slices of any tensors of a checkpoint, each byte verified, and no file that they do not lie in."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.boxes import Box
from checkpoint.extents import parts_of
from checkpoint.files import read_manifest
from checkpoint.manifest import Manifest, file_name
from checkpoint.owners import Owners, Piece
from checkpoint.reads import FilePlan, Reads
from checkpoint.safetensors_header import CODES, StoredValues
from checkpoint.verified_file import VerifiedFile


@dataclass(frozen=True)
class Slice:
    """A part of a stored tensor and the memory that it fills.

    Attributes:
        name: The tensor.
        offsets: Where the part starts.
        out: A tensor of the part's sizes, on any device; values are converted where its dtype is another one.
    """

    name: str
    offsets: tuple[int, ...]
    out: Tensor

    @property
    def box(self) -> Box:
        """The part."""
        return Box(self.offsets, tuple(self.out.shape))


class ShardReader:
    """Serves slices of the tensors of one checkpoint, whatever the mesh that wrote it; needs no process group."""

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        """Reads the manifest; opens no data file.

        Args:
            path: The folder of one step.
            manifest: Its manifest, where that is known.

        Raises:
            ValueError: If it is no complete checkpoint.
        """
        self.path = Path(path)
        self.manifest = read_manifest(path) if manifest is None else manifest
        self.owners = Owners(self.manifest.tensors)
        self._files: dict[int, VerifiedFile] = {}

    def read(
        self,
        name: str,
        offsets: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Reads a part of one tensor.

        Args:
            name: The tensor.
            offsets: Where the part starts; None: at the start of the tensor.
            sizes: Its sizes; None: up to the end of the tensor.
            out: What to fill, of these sizes; None: a new CPU tensor of the stored dtype.

        Raises:
            ValueError: If there is no such tensor or part, or what holds it is damaged.
            OSError: If a file cannot be read.
        """
        if name not in self.manifest.tensors:
            raise ValueError(f"{self.path} holds no tensor {name!r}")
        stored = self.manifest.tensors[name]
        offsets = (0,) * len(stored.shape) if offsets is None else tuple(offsets)
        if out is None:
            if sizes is None:
                sizes = [size - offset for size, offset in zip(stored.shape, offsets, strict=True)]
            self._check_inside(name, Box(offsets, tuple(sizes)))
            out = torch.empty(tuple(sizes), dtype=stored.dtype)
        self.prepare([Slice(name, offsets, out)]).run()
        return out

    def prepare(self, slices: Iterable[Slice]) -> Reads:
        """Finds where slices lie and checks the headers of the files that hold them; fills nothing.

        Raises:
            ValueError: If there is no such part of a tensor, or a file is missing or damaged or does not hold what the
                manifest says.
            OSError: If a file cannot be read.
        """
        plans: dict[int, FilePlan] = {}
        for each in slices:
            box = each.box
            self._check_inside(each.name, box)
            if each.out.numel() == 0:
                continue
            for piece in self.owners.overlapping(each.name, box):
                if piece.rank not in plans:
                    plans[piece.rank] = FilePlan(self.file(piece.rank))
                plan = plans[piece.rank]
                shared = piece.box.overlap(box)
                if shared is not None:
                    values, out = self.check_entry(plan.file, piece), _narrow(each.out, shared.within(box))
                    plan.parts.extend(parts_of(values, shared.within(piece.box), out, plan.file.block_bytes))
        return Reads([plans[rank] for rank in sorted(plans)])

    def file(self, rank: int) -> VerifiedFile:
        """The file that a rank wrote, its digests and header checked.

        Raises:
            ValueError: If it is missing or damaged.
            OSError: If it cannot be read.
        """
        if rank not in self._files:
            name = file_name(rank)
            if name not in self.manifest.files:
                raise ValueError(f"{self.path}: the manifest lists no file {name}, which must hold some tensors")
            remedy = f"delete the damaged folder {self.path}, and a run goes on from the checkpoint before it"
            stored = self.manifest.files[name]
            self._files[rank] = VerifiedFile(self.path / name, stored, self.manifest.block_bytes, remedy)
        return self._files[rank]

    def check_entry(self, file: VerifiedFile, piece: Piece) -> StoredValues:
        """Where a piece lies in its file.

        Raises:
            ValueError: If the file does not hold it, or with another dtype or shape.
        """
        stored = self.manifest.tensors[piece.name]
        key = piece.key(stored.shape)
        values = file.header.tensors.get(key)
        if values is None or values.dtype != stored.dtype or values.shape != piece.box.sizes:
            found = "nothing" if values is None else f"{CODES[values.dtype]} {list(values.shape)}"
            raise ValueError(
                f"{file.path} holds {found} as {key!r}, but the manifest says {CODES[stored.dtype]} "
                f"{list(piece.box.sizes)}; files of different checkpoints are mixed; {file.remedy}"
            )
        return values

    def _check_inside(self, name: str, box: Box) -> None:
        stored = self.manifest.tensors.get(name)
        if stored is None:
            raise ValueError(f"{self.path} holds no tensor {name!r}")
        inside = len(box.offsets) == len(box.sizes) == len(stored.shape) and all(
            offset >= 0 and size >= 0 and offset + size <= limit
            for offset, size, limit in zip(box.offsets, box.sizes, stored.shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"{name} of shape {list(stored.shape)} has no part of sizes {list(box.sizes)} at {list(box.offsets)}"
            )


def _narrow(whole: Tensor, box: Box) -> Tensor:
    """The memory of a slice that a part of it fills."""
    out = whole.detach() if whole.requires_grad else whole
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != out.shape[dim]:
            out = out.narrow(dim, offset, size)
    return out
