"""Keeps two runs out of one output folder."""

import fcntl
from contextlib import ExitStack
from pathlib import Path

LOCK_NAME = ".lock"


def enter_alone(folder: str, stack: ExitStack) -> None:
    """Takes an output folder until the stack is left, or the process ends in whatever way.

    Args:
        folder: The folder; made if it is not there.
        stack: What holds the lock.

    Raises:
        ValueError: If another run is in there.
        OSError: If the folder cannot be written.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    file = stack.enter_context((path / LOCK_NAME).open("w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another run is writing to {folder!r}; wait for it, or name another output.folder") from error
