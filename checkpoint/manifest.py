"""The manifest of a checkpoint: everything in it but the values of its tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from checkpoint import strict_json
from checkpoint.fields import Fields
from checkpoint.owners import StoredTensor
from checkpoint.strict_json import Json, dumps
from checkpoint.tensor_table import read_mesh, read_tensors, tensor_json

MANIFEST_NAME = "manifest.json"
FORMAT = "meshwright checkpoint"
VERSION = 2
FILE_NAME = re.compile(r"rank-(\d{5,9})\.safetensors")
BLOCK_BYTES = 16 << 10
"""Bytes under one digest. Reading half of a tensor reads two half blocks too many; hashing is as fast with as few."""
MAX_BLOCK_BYTES = 4 << 20
"""As many as are read at a time."""
MAX_BYTES = 32 << 20
"""Size of a manifest, some hundred thousand tensors; parsing takes about 30 times its size of memory at worst."""
MAX_RANKS = 1 << 20
MAX_FILE_BYTES = 1 << 53

_TAIL = re.compile(rb',\n"digest": "([0-9a-f]{32})"\n\}\n')
_TAIL_BYTES = len(b',\n"digest": ""\n}\n') + 32


def file_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def digests_name(file: str) -> str:
    """Name of the file that holds the digests of a data file's blocks."""
    return f"{file.removesuffix('.safetensors')}.digests"


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
class StoredFile:
    """A data file.

    Attributes:
        num_bytes: Its size.
        digest: Digest of the digests of its blocks, 16 hexadecimal digits.
    """

    num_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's table of contents. It grows with the number of tensors plus the number of ranks.

    Attributes:
        header: All that is no tensor.
        tensors: Canonical name -> tensor. Which rank's file holds which part of it follows from that alone
            (`checkpoint.owners`).
        files: Name of each data file -> its size and digest.
        block_bytes: Bytes of a data file under one digest.
    """

    header: Header
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    block_bytes: int = BLOCK_BYTES

    def to_text(self) -> str:
        """The text of manifest.json: a line for each tensor and file, and last the digest of all that is before it.

        Raises:
            ValueError: If it is longer than a manifest may be.
        """
        meshes = list(dict.fromkeys(tensor.layout.mesh for tensor in self.tensors.values()))
        number = {mesh: index for index, mesh in enumerate(meshes)}
        document: dict[str, Json] = {
            "format": FORMAT,
            "version": VERSION,
            "block_bytes": self.block_bytes,
            "header": strict_json.to_json(vars(self.header), "header"),
            "meshes": [dict(mesh) for mesh in meshes],
            "files": {name: {"bytes": each.num_bytes, "digest": each.digest} for name, each in self.files.items()},
            "tensors": {name: tensor_json(tensor, number) for name, tensor in self.tensors.items()},
        }
        text = sign(document)
        if len(text.encode()) > MAX_BYTES:
            raise ValueError(f"the manifest would take {len(text.encode())} bytes, but only {MAX_BYTES} are read back")
        return text

    @classmethod
    def from_text(cls, text: bytes, where: str) -> "Manifest":
        """Reads manifest.json, trusting nothing in it.

        Args:
            text: What the file holds.
            where: Its path, for messages.

        Raises:
            ValueError: If it is not a manifest of this format, is damaged, names a file outside its folder, or
                describes tensors that cannot be.
        """
        root = Fields(_parse(text, where), where)
        if root.get("format", str) != FORMAT:
            raise ValueError(f"{where} is not a {FORMAT}: its format is {root.get('format', str)!r}")
        if root.get("version", int) != VERSION:
            raise ValueError(f"{where} has format version {root.get('version', int)}; this release reads {VERSION}")
        _check_digest(text, where)
        block_bytes = root.count("block_bytes")
        if not 1 <= block_bytes <= MAX_BLOCK_BYTES:
            raise ValueError(f"{where} has blocks of {block_bytes} bytes; legal: 1 to {MAX_BLOCK_BYTES}")
        header = _read_header(root.sub("header"))
        files = {name: _read_file(root.sub("files").sub(name), name, header) for name in root.get("files", dict)}
        meshes = [read_mesh(item, where, header.world_size) for item in root.get("meshes", list)]
        tensors = read_tensors(root.sub("tensors"), meshes)
        described, held = sum(each.num_bytes for each in tensors.values()), sum(f.num_bytes for f in files.values())
        if described > held:
            raise ValueError(f"{where} describes tensors of {described} bytes, more than the {held} of all data files")
        return cls(header=header, tensors=tensors, files=files, block_bytes=block_bytes)


def sign(document: Mapping[str, Json]) -> str:
    """The text of a manifest, a line for each entry of its tables, with the digest of it.

    Args:
        document: All of it but the digest.
    """
    lines = []
    for name, value in document.items():
        if name in ("header", "files", "tensors") and isinstance(value, dict):
            entries = ",\n".join(f" {dumps(key)}: {dumps(each)}" for key, each in value.items())
            lines.append(f"{dumps(name)}: {{\n{entries}\n}}")
        else:
            lines.append(f"{dumps(name)}: {dumps(value)}")
    body = "{\n" + ",\n".join(lines)
    return f'{body},\n"digest": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}\n'


def _parse(text: bytes, where: str) -> Json:
    if len(text) > MAX_BYTES:
        raise ValueError(f"{where} has {len(text)} bytes; manifests of up to {MAX_BYTES} are read")
    # Before it is parsed, because empty lists take 30 times the memory of their text.
    if text.count(b"[") + text.count(b"{") > len(text) // 8 + 64:
        raise ValueError(f"{where} holds more brackets than a manifest can have")
    try:
        return strict_json.loads(text.decode(), where)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from error


def _check_digest(text: bytes, where: str) -> None:
    body, tail = text[:-_TAIL_BYTES], _TAIL.fullmatch(text[-_TAIL_BYTES:])
    if tail is None or tail[1].decode() != xxhash.xxh3_128_hexdigest(body):
        raise ValueError(f"{where} does not have the digest that it ends with: bytes 0 to {len(body)} are damaged")


def _read_header(reader: Fields) -> Header:
    optimizer, stateful = reader.value.get("optimizer"), reader.sub("stateful")
    world_size = reader.count("world_size")
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"{reader.where}: world_size={world_size} must be from 1 to {MAX_RANKS}")
    return Header(
        step=reader.count("step"),
        num_tokens=reader.count("num_tokens"),
        world_size=world_size,
        layout=reader.get("layout", dict),
        optimizer=None if optimizer is None else reader.get("optimizer", dict),
        stateful={name: stateful.get(name, dict) for name in reader.get("stateful", dict)},
        recipe=reader.get("recipe", dict),
    )


def _read_file(reader: Fields, name: str, header: Header) -> StoredFile:
    match = FILE_NAME.fullmatch(name)
    if match is None or name != file_name(int(match[1])) or int(match[1]) >= header.world_size:
        raise ValueError(
            f"{reader.where}: lists the file {name!r}; data files of {header.world_size} ranks are named from "
            f"{file_name(0)} to {file_name(header.world_size - 1)}"
        )
    num_bytes, digest = reader.count("bytes"), reader.get("digest", str)
    if num_bytes > MAX_FILE_BYTES or not re.fullmatch("[0-9a-f]{16}", digest):
        raise ValueError(f"{reader.where} has {num_bytes} bytes and the digest {digest!r}; that is no data file")
    return StoredFile(num_bytes=num_bytes, digest=digest)
