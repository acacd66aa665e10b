"""Folders that are made once, whole or not at all, by one of the processes that want them at the same time."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def cached(folder: Path, key: str, *, open_it: Callable[[Path], T | None], make_it: Callable[[Path], None]) -> T:
    """What a folder of the cache holds; it is made if it is not there.

    One process of those on a file system makes it, under a lock that the system takes back from a process that is
    killed; the others wait, and get its error if it fails. It gets its name only when it is complete. Where the file
    system has no locks, several may make it at once, each for itself, and the first one stays.

    Args:
        folder: The cache.
        key: Name of the folder in it, different for everything that must not be mixed up.
        open_it: Reads a folder, and gives None if it is not complete.
        make_it: Fills a new folder.

    Raises:
        ValueError: If it cannot be made, or the cache cannot be written.
    """
    final = folder / key
    found = open_it(final)
    if found is not None:
        return found
    failure = folder / f"{key}.error"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        failed_before = _written_ns(failure)
        with _locked(folder / f"{key}.lock") as locked:
            # Asked first, since it makes a network file system look again at what others have done.
            left = list(folder.glob(f"{key}.*.tmp"))
            found = open_it(final)
            if found is not None:
                return found
            # An error from before is not taken on trust, one from while this process waited is.
            if _written_ns(failure) != failed_before:
                raise ValueError(failure.read_text())
            if locked:
                # Nobody else is at work, so these are of processes that were killed.
                for each in left:
                    shutil.rmtree(each, ignore_errors=True)
            try:
                _make(final, open_it, make_it)
            except ValueError as error:
                with contextlib.suppress(OSError):
                    failure.write_text(str(error))
                raise
            failure.unlink(missing_ok=True)
            found = open_it(final)
    except OSError as error:
        raise ValueError(
            f"cannot write to the cache of tokens {str(folder)!r}: {error.strerror or error}; make room there, or name "
            "another folder as the data's cache"
        ) from error
    if found is None:
        raise ValueError(f"{str(final)!r} was removed or damaged as soon as it was made; do not clear the cache now")
    return found


def _make(final: Path, open_it: Callable[[Path], T | None], make_it: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{final.name}.", suffix=".tmp", dir=final.parent))
    try:
        make_it(temporary)
        # mkdtemp lets only the owner in, as no other folder does.
        temporary.chmod(0o777 & ~_umask())
        if open_it(final) is None:
            # What is there is broken, so that a new one cannot take its name.
            shutil.rmtree(final, ignore_errors=True)
            try:
                temporary.rename(final)
            except OSError:
                # Without locks another process may have been faster.
                if open_it(final) is None:
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds a lock, or gives False where the file system has none; the file stays, since others may wait on it."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _written_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _umask() -> int:
    # The only way to read it is to set it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
