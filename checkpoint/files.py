"""Writes and reads the manifest of a folder."""

import os
import re
import stat
from pathlib import Path

from checkpoint import filesystem
from checkpoint.manifest import MANIFEST_NAME, MAX_BYTES, Manifest, digests_name

NUMBERED_NAME = re.compile(r"step-([0-9]+)|\.step-([0-9]+)\.old-[0-9a-f]{8}")
"""Names of folders that tell a step."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes manifest.json, which makes a folder complete; every other file is on disk by then.

    Raises:
        OSError: If it cannot be written.
    """
    descriptor = filesystem.create(folder / MANIFEST_NAME)
    try:
        filesystem.write(descriptor, [memoryview(manifest.to_text().encode())])
        filesystem.sync(descriptor)
    finally:
        os.close(descriptor)
    filesystem.sync_folder(folder)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Reads the table of contents of one checkpoint and looks whether its files are there.

    Args:
        path: The folder of one step.

    Raises:
        ValueError: If it is no complete checkpoint; the message says what is wrong.
    """
    manifest = Manifest.from_text(read_text(Path(path)), str(Path(path) / MANIFEST_NAME))
    check_name(Path(path), manifest)
    check_files(Path(path), manifest)
    return manifest


def read_text(path: Path) -> bytes:
    """The text of a folder's manifest.

    Raises:
        ValueError: If there is none, or it is longer than a manifest may be.
    """
    manifest = path / MANIFEST_NAME
    try:
        descriptor, size = open_plain(manifest)
    except FileNotFoundError:
        raise ValueError(f"{path} holds no {MANIFEST_NAME}, so it is no complete checkpoint") from None
    with os.fdopen(descriptor, "rb") as file:
        if size > MAX_BYTES:
            raise ValueError(f"{manifest} has {size} bytes; manifests of up to {MAX_BYTES} are read")
        return file.read(MAX_BYTES)


def open_plain(path: Path) -> tuple[int, int]:
    """Opens a file of a checkpoint for reading.

    Returns:
        Its descriptor and its size.

    Raises:
        ValueError: If it is a link, a pipe or the like.
        OSError: If it cannot be opened.
    """
    try:
        # Not following a link, and not waiting for whoever writes to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        if path.is_symlink():
            raise ValueError(f"{path} is not a plain file; a checkpoint holds no links") from None
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a plain file; a checkpoint holds no links")
    return descriptor, found.st_size


def check_name(path: Path, manifest: Manifest) -> None:
    """Holds the step in a folder's name, if there is one, against its manifest.

    Raises:
        ValueError: If they differ.
    """
    match = NUMBERED_NAME.fullmatch(path.name)
    if match and int(match[1] or match[2]) != manifest.header.step:
        raise ValueError(f"{path} holds step {manifest.header.step}; it was renamed, give it its own name back")


def check_files(path: Path, manifest: Manifest) -> None:
    """Holds a folder against its manifest.

    Raises:
        ValueError: If a file is missing, is a link or the like, or has another size.
    """
    for name, stored in manifest.files.items():
        num_digest_bytes = -(-stored.num_bytes // manifest.block_bytes) * 8
        for each, size in ((name, stored.num_bytes), (digests_name(name), num_digest_bytes)):
            try:
                found = os.lstat(path / each)
            except FileNotFoundError:
                raise ValueError(f"{path / each} is missing; its checkpoint is not complete") from None
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{path / each} is not a plain file; a checkpoint holds no links")
            if found.st_size != size:
                raise ValueError(
                    f"{path / each} has {found.st_size} bytes, but the manifest says {size}; it is damaged"
                )
