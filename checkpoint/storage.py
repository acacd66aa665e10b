"""What torch.distributed.checkpoint writes through and reads through: safetensors files and one manifest."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from checkpoint import files, filesystem, safetensors_file
from checkpoint.manifest import Chunk, Header, Manifest, StoredTensor, file_name
from checkpoint.safetensors_file import CODES, Entry

T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """Where a rank put a chunk, as it tells the coordinator."""

    chunk: Chunk
    file_bytes: int


class ShardWriter(StorageWriter):
    """Writes this rank's chunks into one file; the coordinator adds the manifest, last."""

    def __init__(self, folder: Path, header: Header, rank: int) -> None:
        """Keeps what the manifest needs.

        Args:
            folder: Exists; nothing of it is trusted by readers before the manifest is there.
            header: All that is no tensor.
            rank: This rank.
        """
        self.folder, self.header, self.file = folder, header, file_name(rank)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: one writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Drops empty shards.

        They may start where another rank's shard starts, and would then pass for a replica of it.
        """
        return replace(plan, items=[item for item in plan.items if prod(_data_of(item).chunk.sizes)])

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leaves the plans alone."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file, if it has anything to write."""
        # Wide dtypes first keeps every tensor aligned.
        items = sorted(plan.items, key=lambda item: -_data_of(item).properties.dtype.itemsize)
        entries = [_entry(item) for item in items]
        results: list[WriteResult] = []
        if items:
            size = safetensors_file.write(self.folder / self.file, entries, _tensors(items, planner))
            results = [_result(item, entry, self.file, size) for item, entry in zip(items, entries, strict=True)]
        filesystem.sync_folder(self.folder)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest."""
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        sizes: dict[str, int] = {}
        for result in (result for of_rank in results for result in of_rank):
            stored: Stored = result.storage_data
            chunks[result.index.fqn].append(stored.chunk)
            sizes[stored.chunk.file] = stored.file_bytes
        tensors = {
            name: StoredTensor(
                dtype=tensor.properties.dtype, shape=tuple(tensor.size), chunks=tuple(chunks.get(name, ()))
            )
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        files.write_manifest(self.folder, Manifest(header=self.header, tensors=tensors, files=sizes))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Says no: it is never chosen by the look of a path."""
        return False


class ShardReader(StorageReader):
    """Reads the slices that this rank needs out of the files that a manifest lists."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Keeps where to read.

        Args:
            folder: The checkpoint.
            manifest: Its table of contents.
        """
        self.folder, self.manifest = folder, manifest
        self.chunks = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: one reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in the planner's terms."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=_size(tensor.shape),
                    chunks=[
                        ChunkStorageMetadata(offsets=_size(chunk.offsets), sizes=_size(chunk.sizes))
                        for chunk in tensor.chunks
                    ],
                )
                for name, tensor in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the manifest is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Drops reads of nothing, which empty shards ask for."""
        return LoadPlan([item for item in plan.items if prod(item.lengths)], plan.storage_data, plan.planner_data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leaves the plans alone."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills this rank's tensors, file by file."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.chunks[item.storage_index].file].append(item)
        for file, items in by_file.items():
            path = self.folder / file
            try:
                with safe_open(path, framework="pt") as opened:
                    for item in items:
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(self._read(opened, path, item))
                        planner.commit_tensor(item, target)
            except SafetensorError as error:
                raise ValueError(f"{path} is not a valid safetensors file: {error}; {self._remedy}") from error
        return _done(None)

    @property
    def _remedy(self) -> str:
        return f"delete the damaged folder {self.folder}, and a run goes on from the checkpoint before it"

    def _read(self, opened: Any, path: Path, item: ReadItem) -> Tensor:
        chunk = self.chunks[item.storage_index]
        dtype = self.manifest.tensors[item.storage_index.fqn].dtype
        found = opened.get_slice(chunk.key)
        if tuple(found.get_shape()) != chunk.sizes or found.get_dtype() != CODES[dtype]:
            raise ValueError(
                f"{path}: {chunk.key!r} is {found.get_dtype()} {found.get_shape()}, but the manifest says "
                f"{CODES[dtype]} {list(chunk.sizes)}; files of different checkpoints are mixed; {self._remedy}"
            )
        if not chunk.sizes:
            return opened.get_tensor(chunk.key)
        return found[
            tuple(slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths, strict=True))
        ]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Says no: it is never chosen by the look of a path."""
        return False


def _data_of(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise ValueError(f"{item.index.fqn} is no tensor; a checkpoint's files hold tensors alone")
    return item.tensor_data


def _entry(item: WriteItem) -> Entry:
    data = _data_of(item)
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    whole = sizes == tuple(data.size)
    key = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, offsets))}"
    return Entry(key=key, dtype=data.properties.dtype, shape=sizes)


def _tensors(items: list[WriteItem], planner: SavePlanner) -> Iterator[Tensor]:
    for item in items:
        values = planner.resolve_data(item)
        if not isinstance(values, Tensor):
            raise ValueError(f"{item.index.fqn} is no tensor; a checkpoint's files hold tensors alone")
        yield values


def _result(item: WriteItem, entry: Entry, file: str, file_bytes: int) -> WriteResult:
    offsets = tuple(_data_of(item).chunk.offsets)
    chunk = Chunk(file=file, key=entry.key, offsets=offsets, sizes=entry.shape)
    return WriteResult(index=item.index, size_in_bytes=entry.num_bytes, storage_data=Stored(chunk, file_bytes))


def _size(values: tuple[int, ...]) -> torch.Size:
    return torch.Size(values)


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
