"""Every change that a save makes to the file system goes through one of these calls, so that tests can stop at each."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MAX_WRITE_BYTES = 1 << 30
"""Linux writes at most 2 GiB in one call."""

_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2


def make_folder(path: Path) -> None:
    """Makes one folder, whose parent exists; the name is on disk once the parent is synced."""
    os.mkdir(path)


def create(path: Path) -> int:
    """Opens a new file for writing.

    Returns:
        Its descriptor, to be closed by the caller.

    Raises:
        FileExistsError: If there is one already.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def reopen(path: Path) -> int:
    """Opens a file that is there for writing at places in it.

    Returns:
        Its descriptor, to be closed by the caller.
    """
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def write(descriptor: int, buffers: Sequence[memoryview]) -> None:
    """Writes all bytes of some buffers at the end of what was written so far."""
    for buffer in buffers:
        at, flat = 0, buffer.cast("B")
        while at < len(flat):
            at += os.write(descriptor, flat[at : at + MAX_WRITE_BYTES])


def write_at(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Writes all bytes of a buffer at a place in a file, beside others that write elsewhere in it."""
    at = 0
    while at < len(buffer):
        at += os.pwrite(descriptor, buffer[at : at + MAX_WRITE_BYTES], offset + at)


def set_size(descriptor: int, num_bytes: int) -> None:
    """Gives a file its size, and room for it on the disk where the file system can promise that."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, num_bytes)


def start_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Lets the disk start on bytes that were written, so that `sync` finds little left; a hint where it is known."""
    call = getattr(_LIBC, "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


def set_direct(descriptor: int, on: bool) -> bool:
    """Turns writing straight to the disk on or off, which takes whole pages of memory and of the file.

    Returns:
        Whether that is what the file does now; many file systems cannot.
    """
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return not on
    return bool(flag) or not on


def sync(descriptor: int) -> None:
    """Waits until the disk has a file's bytes."""
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Waits until the disk knows the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Gives a file or folder another name at once; replaces an existing file, or a folder if it is empty."""
    os.rename(source, target)


def remove_file(path: Path) -> None:
    """Removes one file."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Removes one empty folder."""
    os.rmdir(path)


def make_folders(path: Path) -> None:
    """Makes a folder with all that lead to it, each on disk before the next, or finds them there."""
    if not path.is_dir():
        make_folders(path.parent)
        # Another process may be faster.
        with suppress(FileExistsError):
            make_folder(path)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{path} is a file; name another folder")
        sync_folder(path.parent)


def remove_tree(folder: Path) -> None:
    """Removes a folder and all in it, name by name; follows no link."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        remove = remove_tree if entry.is_dir(follow_symlinks=False) else remove_file
        remove(Path(entry.path))
    remove_folder(folder)
