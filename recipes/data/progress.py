"""Shows how far the making of tokens is."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_S = 1.0
_LINE_EVERY_S = 30.0


@contextmanager
def show_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, and elsewhere a line now and then; nothing for what takes no time.

    Only the process that makes the tokens shows it: the ranks that wait for it are silent.

    Args:
        what: What is read.
        total_bytes: Its size.

    Yields:
        What takes note of bytes that have been read.
    """
    if sys.stderr.isatty():
        with _bar(what, total_bytes) as advance:
            yield advance
    else:
        yield _Lines(what, total_bytes).advance


@contextmanager
def _bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("tokenising {task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=total_bytes)
    start_s, shown = time.monotonic(), False

    def advance(num_bytes: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - start_s > _QUIET_S:
            progress.start()
            shown = True
        progress.advance(task, num_bytes)

    try:
        yield advance
    finally:
        progress.stop()


class _Lines:
    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total_bytes, self._num_bytes = what, total_bytes, 0
        self._next_s = time.monotonic() + _LINE_EVERY_S

    def advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_EVERY_S
            share = self._num_bytes / max(1, self._total_bytes)
            print(
                f"tokenising {self._what}: {share:.0%} of {self._total_bytes / 1e6:,.0f} MB",
                file=sys.stderr,
                flush=True,
            )
