"""Finds the text files of a source, and splits them into those to train on and those held out."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from recipes.data.config import PYTHON_STDLIB, DataConfig

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class Document:
    """One piece of text that belongs together: a file, or a part of one.

    Attributes:
        name: Path relative to the source, with forward slashes.
        text: Its bytes.
    """

    name: str
    text: bytes


def read_documents(config: DataConfig) -> tuple[list[Document], list[Document]]:
    """The documents to train on and the held-out ones, each sorted by name; the same in every process.

    Files without text are left out. Where a folder has files to choose from, at least one is trained on and at
    least one held out; where a source is one file, its last bytes are held out.

    Args:
        config: Which files, and how many of them are held out.

    Raises:
        ValueError: If there is no such file or folder, no file matches, one cannot be read, or none holds text.
    """
    root, names = _find_files(config)
    documents = [Document(name=name, text=_read(root / name)) for name in names]
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise ValueError(f"no text in {config.source!r}: {len(names)} file(s) read, all of them empty")
    if config.held_out_fraction == 0:
        return documents, []
    if len(documents) == 1:
        return _split_document(documents[0], config.held_out_fraction)
    return _split_by_name(documents, config.held_out_fraction)


def _find_files(config: DataConfig) -> tuple[Path, list[str]]:
    of_stdlib = config.source == PYTHON_STDLIB
    root = Path(sysconfig.get_path("stdlib") if of_stdlib else os.path.expanduser(config.source))
    patterns = ("*.py",) if of_stdlib else config.patterns
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


def _read(path: Path) -> bytes:
    if os.path.exists(path) and not os.path.isfile(path):
        # A pipe would keep the reader waiting for ever.
        raise ValueError(f"cannot read {str(path)!r} (data source): not a regular file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r} (data source): {error.strerror}") from error


def _split_by_name(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """By a hash of the name, so that a file stays on its side when others come or go."""
    by_hash = sorted(documents, key=lambda document: _name_hash(document.name))
    num_held_out = sum(_name_hash(document.name) < fraction for document in by_hash)
    num_held_out = min(max(num_held_out, 1), len(by_hash) - 1)
    held_out = {document.name for document in by_hash[:num_held_out]}
    return (
        [document for document in documents if document.name not in held_out],
        [document for document in documents if document.name in held_out],
    )


def _name_hash(name: str) -> float:
    """A number in [0, 1) that depends on the name only."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _split_document(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    num_held_out = max(1, round(len(document.text) * fraction))
    cut = len(document.text) - num_held_out
    first = Document(name=document.name, text=document.text[:cut])
    last = Document(name=document.name, text=document.text[cut:])
    return [first], [last]
