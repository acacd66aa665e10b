"""Finds the files of a source and tells their format."""

import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from recipes.data.config import PYTHON_STDLIB, SourceConfig

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class SourceFile(NamedTuple):
    """A file of a source, as it was when it was looked for.

    Attributes:
        name: Path relative to the source, with forward slashes.
        path: Where it is.
        num_bytes: Its size.
        modified_ns: When it was last written, in nanoseconds.
    """

    name: str
    path: str
    num_bytes: int
    modified_ns: int


def find_files(source: SourceConfig) -> list[SourceFile]:
    """The files of a source, sorted by name.

    Args:
        source: Where to look, and which names count.

    Raises:
        ValueError: If there is no such file or folder, no file matches, or one is no regular file.
    """
    root, names = _find_names(source)
    return [_look_at(root, name) for name in names]


def format_of(source: SourceConfig, files: Sequence[SourceFile]) -> str:
    """The format of a source's files: `text`, `jsonl` or `parquet`.

    Args:
        source: What the user said about it.
        files: Its files.

    Raises:
        ValueError: If the files' names say several formats, or text where records are needed.
    """
    if source.format != "auto":
        return source.format
    by_format = {_FORMATS.get(PurePosixPath(file.name).suffix.lower(), "text"): file.name for file in files}
    if len(by_format) > 1:
        listing = ", ".join(f"{name!r} is {format_}" for format_, name in sorted(by_format.items()))
        raise ValueError(
            f"the files of {source.source!r} (data source) have several formats: {listing}; "
            "choose some with patterns, or say the format"
        )
    (format_,) = by_format
    if format_ == "text" and source.record == "chat":
        raise ValueError(
            f"record='chat' needs records, but {files[0].name!r} in {source.source!r} (data source) is read as text; "
            "say format 'jsonl' or 'parquet' if it is that"
        )
    return format_


def _find_names(source: SourceConfig) -> tuple[Path, list[str]]:
    of_stdlib = source.source == PYTHON_STDLIB
    root = Path(sysconfig.get_path("stdlib") if of_stdlib else os.path.expanduser(source.source))
    patterns = ("*.py",) if of_stdlib else source.patterns
    # os.path, since Path's own questions raise where a parent folder may not be read.
    if os.path.isfile(root):
        return root.parent, [root.name]
    if not os.path.exists(root):
        raise ValueError(f"no such file or folder: {str(root)!r} (data source); the working folder is {os.getcwd()!r}")
    if not os.path.isdir(root):
        raise ValueError(f"{str(root)!r} (data source) is neither a regular file nor a folder")
    names = sorted(_walk(root, _NOT_STDLIB if of_stdlib else frozenset()))
    if not names:
        raise ValueError(f"the folder {str(root)!r} (data source) holds no files")
    chosen = [name for name in names if any(PurePosixPath(name).match(pattern) for pattern in patterns)]
    if not chosen:
        raise ValueError(
            f"none of the {len(names)} files in {str(root)!r} (data source) matches {' '.join(patterns)}; "
            f"the first is {names[0]!r}: name other patterns, '*' for all"
        )
    return root, chosen


def _walk(root: Path, left_out: frozenset[str]) -> Iterator[str]:
    """Names of all files below a folder, relative to it; links to folders are followed, each folder once."""
    seen = {os.path.realpath(root)}
    for folder, subfolders, files in os.walk(root, onerror=_refuse_folder, followlinks=True):
        kept = []
        # Sorted, so that of two links to one folder the same one counts on every machine.
        for name in sorted(subfolders):
            real = os.path.realpath(os.path.join(folder, name))
            if not name.startswith(".") and name not in left_out and real not in seen:
                seen.add(real)
                kept.append(name)
        subfolders[:] = kept
        for name in files:
            yield Path(folder, name).relative_to(root).as_posix()


def _refuse_folder(error: OSError) -> None:
    raise ValueError(f"cannot read the folder {error.filename!r} (data source): {error.strerror}") from error


def _look_at(root: Path, name: str) -> SourceFile:
    path = str(root / name)
    try:
        status = os.stat(path)
    except OSError as error:
        raise ValueError(f"cannot read {path!r} (data source): {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        # A pipe would keep the reader waiting for ever.
        raise ValueError(f"cannot read {path!r} (data source): not a regular file")
    return SourceFile(name=name, path=path, num_bytes=status.st_size, modified_ns=status.st_mtime_ns)
