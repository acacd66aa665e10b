"""Opens the folders in which Hugging Face models lie: one config.json, one or many .safetensors files, an index."""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import strict_json
from checkpoint.safetensors_header import StoredValues, read_header

CONFIG_NAME = "config.json"
FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 8 << 20
MAX_INDEX_BYTES = 16 << 20
"""Some hundred thousand tensors; parsing takes about 30 times its size of memory at worst."""
MAX_FILES = 10_000
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


@dataclass(frozen=True, kw_only=True)
class HubFolder:
    """The tensors of a folder.

    Attributes:
        path: The folder.
        tensors: Name -> name of its file and where it lies there.
        files: Name of each file -> its size in bytes.
    """

    path: Path
    tensors: Mapping[str, tuple[str, StoredValues]]
    files: Mapping[str, int]

    def open(self, name: str) -> int:
        """Opens a file for reading.

        Args:
            name: A key of `files`.

        Returns:
            Its descriptor, to be closed by the caller.

        Raises:
            ValueError: If it is not as it was when its header was read.
            OSError: If it cannot be opened.
        """
        descriptor, num_bytes = _open(self.path / name)
        if num_bytes != self.files[name]:
            os.close(descriptor)
            raise ValueError(
                f"{self.path / name} has {num_bytes} bytes and had {self.files[name]} before; leave it alone"
            )
        return descriptor


def is_hub_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path looks like the folder of a Hugging Face model.

    Args:
        path: The path.
    """
    names = (FILE_NAME, INDEX_NAME)
    return (Path(path) / CONFIG_NAME).is_file() and any((Path(path) / name).is_file() for name in names)


def read_hub_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the config.json of a folder holds.

    Args:
        path: The folder.

    Raises:
        ValueError: If there is none, or it is not a JSON object.
        OSError: If it cannot be read.
    """
    return _read_json(Path(path) / CONFIG_NAME, MAX_CONFIG_BYTES)


def open_hub_folder(path: str | os.PathLike[str]) -> HubFolder:
    """Reads the index and the headers of a folder, and no values.

    Args:
        path: The folder; links in it are followed, as the cache of `huggingface_hub` consists of them.

    Raises:
        ValueError: If it holds no tensors, or a file is damaged or hostile, or index and files say different things.
        OSError: If a file cannot be read.
    """
    path = Path(path)
    placed = _index(path)
    names = [FILE_NAME] if placed is None else sorted(set(placed.values()))
    tensors: dict[str, tuple[str, StoredValues]] = {}
    files: dict[str, int] = {}
    for name in names:
        descriptor, files[name] = _open(path / name)
        try:
            found = read_header(descriptor, str(path / name)).tensors
        finally:
            os.close(descriptor)
        if placed is not None:
            expected = {key for key, file in placed.items() if file == name}
            if expected != found.keys():
                wrong = sorted(expected ^ found.keys())
                raise ValueError(
                    f"{path / INDEX_NAME} and {name} do not agree on {len(wrong)} tensors: {', '.join(wrong[:5])}; "
                    "one of them is of another model"
                )
        tensors |= {key: (name, values) for key, values in found.items()}
    return HubFolder(path=path, tensors=tensors, files=files)


def _index(path: Path) -> dict[str, str] | None:
    """Tensor -> file, None for a folder of one file."""
    has_file, has_index = (path / FILE_NAME).is_file(), (path / INDEX_NAME).is_file()
    if has_file and has_index:
        raise ValueError(f"{path} holds {FILE_NAME} and {INDEX_NAME}; remove the one that is not meant")
    if not has_file and not has_index:
        raise ValueError(
            f"{path} holds neither {FILE_NAME} nor {INDEX_NAME}; a model in another format has to be saved as "
            "safetensors first"
        )
    if has_file:
        return None
    placed = _read_json(path / INDEX_NAME, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{path / INDEX_NAME}: weight_map must be a JSON object with the file of each tensor")
    for name in placed.values():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise ValueError(
                f"{path / INDEX_NAME} lists the file {str(name)[:80]!r}, which is no name of a file beside it"
            )
    if len(set(placed.values())) > MAX_FILES:
        raise ValueError(f"{path / INDEX_NAME} lists more than {MAX_FILES} files")
    return placed


def _read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    descriptor, num_bytes = _open(path)
    with os.fdopen(descriptor, "rb") as file:
        if num_bytes > max_bytes:
            raise ValueError(f"{path} has {num_bytes} bytes; up to {max_bytes} are read")
        text = file.read(max_bytes + 1)
    try:
        value = strict_json.loads(text.decode(), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must be a JSON object")
    return value


def _open(path: Path) -> tuple[int, int]:
    """A descriptor and the size of a plain file; a pipe of that name does not make anybody wait."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ValueError(f"{path} is not there") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a plain file")
    return descriptor, found.st_size
