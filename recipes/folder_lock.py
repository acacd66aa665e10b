"""Keeps two runs out of one output folder."""

import fcntl
import os
import secrets
import socket
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

LOCK_NAME = ".lock"


class FolderLock:
    """A run's hold on its output folder until it is left, or the process ends in whatever way."""

    def __init__(self, folder: str) -> None:
        """Holds nothing yet; use it as a context manager, on one rank of a job.

        Args:
            folder: The folder; made if it is not there.
        """
        self._path = Path(folder) / LOCK_NAME
        self._owner = f"process {os.getpid()} on {socket.gethostname()} {secrets.token_hex(4)}\n"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Takes the folder.

        Raises:
            ValueError: If another run is in there.
            OSError: If the folder cannot be written.
        """
        folder = str(self._path.parent)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise OSError(error.errno, f"{folder!r} is a file, or lies in one; name another output.folder") from error
        with ExitStack() as stack:
            try:
                file = stack.enter_context(self._path.open("a+"))
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{folder!r} takes no file {LOCK_NAME}, which keeps other runs out ({error.strerror}); make it "
                    "writable, or name another output.folder",
                ) from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"another run is writing to {str(self._path.parent)!r} ({self._read_owner() or 'unknown'}); wait "
                    "for it, or name another output.folder"
                ) from error
            file.truncate(0)
            file.write(self._owner)
            file.flush()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives the folder back."""
        self._stack.close()

    def check(self) -> None:
        """Makes sure that the folder is still this run's: not every file system keeps runs on other nodes out.

        Raises:
            OSError: If another run has taken it.
        """
        owner = self._read_owner()
        if owner != self._owner.strip():
            raise OSError(
                f"another run ({owner or 'unknown'}) has taken {str(self._path.parent)!r}, whose file system does not "
                "lock over nodes; start one run a folder"
            )

    def _read_owner(self) -> str:
        try:
            return self._path.read_text(errors="replace")[:200].strip()
        except FileNotFoundError as error:
            raise OSError(
                error.errno,
                f"{str(self._path.parent)!r} or its {LOCK_NAME} is gone; leave it alone while a run goes on",
            ) from error
