"""What a command found, for people and for programs, and how far it has come."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

DIFFERENT = 3
"""Exit code where damage or a difference was found."""
EXIT_CODES = (
    "exit codes: 0 done; 1 an error, which stderr names; 2 a wrong command line; 3 verify found damage, or diff a "
    "difference"
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command found.

    Attributes:
        values: For programs: what JSON can hold.
        shown: For people: what rich can print, one below the other.
        exit_code: 0, or `DIFFERENT`.
    """

    values: Any
    shown: Sequence[RenderableType]
    exit_code: int = 0

    def print(self, *, as_json: bool) -> None:
        """Prints one of the two on stdout.

        Args:
            as_json: Print what is for programs.
        """
        if as_json:
            print(json.dumps(self.values, indent=1, ensure_ascii=False), flush=True)
            return
        # Names and paths may hold brackets.
        console = Console(highlight=False, soft_wrap=True, markup=False)
        for each in self.shown:
            console.print(each)


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows on a terminal's stderr how far long work has come.

    Args:
        what: The work, in words.
        total_bytes: Bytes that it goes through.

    Yields:
        What to call with the bytes that were done since the last call.
    """
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.update(task, advance=num_bytes)
