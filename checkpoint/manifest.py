"""The manifest of a checkpoint: everything in it but the values of its tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch

from checkpoint import strict_json
from checkpoint.coverage import check_coverage
from checkpoint.safetensors_file import CODES
from checkpoint.strict_json import Json

MANIFEST_NAME = "manifest.json"
FORMAT = "meshwright checkpoint"
VERSION = 1
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")

T = TypeVar("T")


def file_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor.

    Attributes:
        file: The file that holds it.
        key: Its name there.
        offsets: Where it starts in the whole tensor, per dim.
        sizes: Its size per dim.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A whole tensor, whatever the ranks that hold parts of it.

    Attributes:
        dtype: Type of its values.
        shape: Its global size per dim.
        chunks: Boxes that cover it, each element once.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a checkpoint holds besides tensors.

    Attributes:
        step: Optimizer steps done.
        num_tokens: Tokens seen.
        world_size: Ranks that wrote it.
        layout: How they were arranged: the resolved ParallelConfig.
        optimizer: Class of the optimizer, hyperparameters of its groups and whatever state is no tensor; None without
            one.
        stateful: Name -> state of everything else that is saved.
        recipe: The recipe of the run.
    """

    step: int
    num_tokens: int
    world_size: int
    layout: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    stateful: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's table of contents.

    Attributes:
        header: All that is no tensor.
        tensors: Canonical name -> tensor.
        files: Name of each data file -> its size in bytes.
    """

    header: Header
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, int]

    def to_text(self) -> str:
        """The text of manifest.json."""
        tensors: dict[str, Json] = {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "chunks": [
                    {"file": chunk.file, "key": chunk.key, "offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
                    for chunk in tensor.chunks
                ],
            }
            for name, tensor in self.tensors.items()
        }
        header = strict_json.to_json(vars(self.header), "header")
        return strict_json.dumps(
            {"format": FORMAT, "version": VERSION, "header": header, "files": dict(self.files), "tensors": tensors}
        )

    @classmethod
    def from_text(cls, text: str, where: str) -> "Manifest":
        """Reads manifest.json, trusting nothing in it.

        Args:
            text: What the file holds.
            where: Its path, for messages.

        Raises:
            ValueError: If it is not a manifest of this format, names a file outside its folder, or lists chunks
                that leave their tensor, overlap or leave a part of it uncovered.
        """
        root = _Reader(strict_json.loads(text, where), where)
        if root.get("format", str) != FORMAT:
            raise ValueError(f"{where} is not a {FORMAT}: its format is {root.get('format', str)!r}")
        if root.get("version", int) != VERSION:
            raise ValueError(f"{where} has format version {root.get('version', int)}; this release reads {VERSION}")
        files = {name: root.sub("files").count(name) for name in root.get("files", dict)}
        for name in files:
            if not FILE_NAME.fullmatch(name):
                raise ValueError(f"{where} lists the file {name!r}; data files are named like {file_name(0)}")
        tensors = {name: _read_tensor(root.sub("tensors").sub(name), files) for name in root.get("tensors", dict)}
        return cls(header=_read_header(root.sub("header")), tensors=tensors, files=files)


class _Reader:
    """Takes typed fields out of parsed JSON, naming the place of what is missing or of another type."""

    def __init__(self, value: Json, where: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a JSON object")
        self.value, self.where = value, where

    def get(self, name: str, kind: type[T]) -> T:
        value = self.value.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ValueError(f"{self.where}: {name!r} must be of type {kind.__name__}")
        return value

    def sub(self, name: str) -> "_Reader":
        return _Reader(self.value.get(name), f"{self.where}: {name!r}")

    def count(self, name: str) -> int:
        return self._natural(self.get(name, int), name)

    def counts(self, name: str) -> tuple[int, ...]:
        return tuple(self._natural(item, name) for item in self.get(name, list))

    def _natural(self, value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise ValueError(f"{self.where}: {name!r} must hold integers from 0 that fit 63 bits, got {value!r}")
        return value


def _read_header(reader: _Reader) -> Header:
    optimizer, stateful = reader.value.get("optimizer"), reader.sub("stateful")
    return Header(
        step=reader.count("step"),
        num_tokens=reader.count("num_tokens"),
        world_size=reader.count("world_size"),
        layout=reader.get("layout", dict),
        optimizer=None if optimizer is None else reader.get("optimizer", dict),
        stateful={name: stateful.get(name, dict) for name in reader.get("stateful", dict)},
        recipe=reader.get("recipe", dict),
    )


def _read_tensor(reader: _Reader, files: Mapping[str, int]) -> StoredTensor:
    dtype, shape = reader.get("dtype", str), reader.counts("shape")
    if dtype not in DTYPES:
        raise ValueError(f"{reader.where} has dtype {dtype!r}; legal: {', '.join(DTYPES)}")
    if prod(shape) * DTYPES[dtype].itemsize > sum(files.values()):
        raise ValueError(f"{reader.where} has shape {list(shape)}, more than all data files hold")
    chunks = tuple(_read_chunk(_Reader(item, f"{reader.where} chunk"), files) for item in reader.get("chunks", list))
    check_coverage(reader.where, shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
    return StoredTensor(dtype=DTYPES[dtype], shape=shape, chunks=chunks)


def _read_chunk(reader: _Reader, files: Mapping[str, int]) -> Chunk:
    file = reader.get("file", str)
    if file not in files:
        raise ValueError(f"{reader.where} lies in {file!r}, which is not one of the manifest's files")
    return Chunk(file=file, key=reader.get("key", str), offsets=reader.counts("offsets"), sizes=reader.counts("sizes"))
