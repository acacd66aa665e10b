"""Lays tensors out over the files of a new Hugging Face folder, and writes parts of them where they belong."""

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from checkpoint import filesystem
from checkpoint.box_io import Scratch, write_box
from checkpoint.boxes import Box
from checkpoint.hub.folder import CONFIG_NAME, FILE_NAME, INDEX_NAME
from checkpoint.hub.places import Places, file_shapes, parts_of
from checkpoint.safetensors_header import StoredValues, build_header, parse_header

Boxes = Iterable[tuple[str, Box, Tensor]]
"""Parts of parameters with their values: fqn, part, values of its sizes."""


@dataclass(frozen=True, kw_only=True)
class NewHubFolder:
    """What is going to lie where, known before anything is written.

    Attributes:
        places: Where files keep each of the parameters.
        files: Name of each file -> its header as bytes.
        tensors: Name of each tensor -> its file, and where it lies there.
    """

    places: Places
    files: Mapping[str, bytes] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, StoredValues]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        places: Places,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        max_file_bytes: int,
    ) -> "NewHubFolder":
        """Divides tensors among files in their order.

        Args:
            places: Where files keep each of the parameters.
            shapes: Shape of each parameter.
            dtypes: Type that its values get.
            max_file_bytes: Most bytes of values in one file, unless one tensor alone has more.

        Raises:
            ValueError: If that is not positive, or a parameter has no place.
        """
        if max_file_bytes < 1:
            raise ValueError(f"max_file_bytes={max_file_bytes} must be positive")
        homeless = sorted(shapes.keys() - places.keys())
        if homeless:
            raise ValueError(f"files have no place for {', '.join(homeless[:5])}")
        ordered = {fqn: places[fqn] for fqn in places if fqn in shapes}
        named = {place.name: dtypes[fqn] for fqn, several in ordered.items() for place in several}
        groups: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
        room = max_file_bytes
        for name, shape in file_shapes(ordered, shapes).items():
            num_bytes = prod(shape) * named[name].itemsize
            if num_bytes > room and groups[-1]:
                groups.append({})
                room = max_file_bytes
            groups[-1][name] = named[name], shape
            room -= num_bytes
        files: dict[str, bytes] = {}
        tensors: dict[str, tuple[str, StoredValues]] = {}
        for number, group in enumerate(groups, 1):
            file = FILE_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            files[file] = build_header(group, {"format": "pt"})
            size = len(files[file]) + sum(prod(shape) * dtype.itemsize for dtype, shape in group.values())
            found = parse_header(files[file][8:], size, file).tensors
            tensors |= {name: (file, found[name]) for name in group}
        return cls(places=ordered, files=files, tensors=tensors)

    def create(self, path: Path) -> Path:
        """Makes a hidden folder beside the one to come, with all its files in their sizes.

        Args:
            path: Where the folder will be.

        Returns:
            The hidden folder.

        Raises:
            ValueError: If there is something already.
            OSError: If it cannot be written.
        """
        if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
            raise ValueError(f"{path} is there already; name a new folder, or remove it")
        filesystem.make_folders(path.absolute().parent)
        temporary = path.absolute().with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        filesystem.make_folder(temporary)
        try:
            for name, header in self.files.items():
                self._create_file(temporary, name, header)
        except BaseException:
            with suppress(OSError):
                filesystem.remove_tree(temporary)
            raise
        return temporary

    def _create_file(self, temporary: Path, name: str, header: bytes) -> None:
        descriptor = filesystem.create(temporary / name)
        try:
            last = max(values.start + values.num_bytes for file, values in self.tensors.values() if file == name)
            filesystem.set_size(descriptor, last)
            filesystem.write_at(descriptor, memoryview(header), 0)
            filesystem.sync(descriptor)
        finally:
            os.close(descriptor)

    def write(self, temporary: Path, boxes: Boxes) -> None:
        """Writes parts of parameters and waits until the disk has them.

        Args:
            temporary: From `create`.
            boxes: The parts.

        Raises:
            ValueError: If a value is too large for its dtype.
            OSError: If a file cannot be written.
        """
        scratch = Scratch()
        opened: dict[str, int] = {}
        with ExitStack() as stack:
            for fqn, box, values in boxes:
                for part in parts_of(self.places[fqn], box, values):
                    file, stored = self.tensors[part.name]
                    if file not in opened:
                        opened[file] = filesystem.reopen(temporary / file)
                        stack.callback(os.close, opened[file])
                    try:
                        write_box(opened[file], stored, part.box, part.values, scratch)
                    except ValueError as error:
                        raise ValueError(f"{part.name}: {error}") from error
            for descriptor in opened.values():
                filesystem.sync(descriptor)

    def publish(
        self, temporary: Path, path: Path, config: Mapping[str, Any], beside: Mapping[str, bytes] = MappingProxyType({})
    ) -> None:
        """Adds what says what is in the files, and gives the folder its name.

        Args:
            temporary: From `create`, all written.
            path: Where the folder will be.
            config: What config.json says of the model.
            beside: Name -> content of other files that belong to the model, its tokenizer's for example.

        Raises:
            OSError: If it cannot be written.
        """
        dtypes = {str(values.dtype).removeprefix("torch.") for _, values in self.tensors.values()}
        # The name that releases 4 and 5 of `transformers` both read.
        _write_json(temporary / CONFIG_NAME, {**config, **({"torch_dtype": dtypes.pop()} if len(dtypes) == 1 else {})})
        if len(self.files) > 1:
            total = sum(values.num_bytes for _, values in self.tensors.values())
            placed = {name: file for name, (file, _) in self.tensors.items()}
            _write_json(temporary / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": placed})
        for name, content in beside.items():
            _write(temporary / name, content)
        filesystem.sync_folder(temporary)
        filesystem.rename(temporary, path.absolute())
        filesystem.sync_folder(path.absolute().parent)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    descriptor = filesystem.create(path)
    try:
        filesystem.write(descriptor, [memoryview(content)])
        filesystem.sync(descriptor)
    finally:
        os.close(descriptor)
