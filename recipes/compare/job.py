"""Runs a function on ranks of its own, within a time limit, so that a failure is a result and not the end."""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from recipes.launch import run


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended.

    Attributes:
        value: What the function returned on rank 0; None if it failed.
        failure: Why it failed, in a line; None if it did not.
        warnings: What rank 0 warned of.
        time_s: Seconds that it took, with starting its ranks.
    """

    value: Any
    failure: str | None
    warnings: tuple[str, ...]
    time_s: float


def run_job(function: Callable[..., Any], *args: Any, num_processes: int, limit_s: float) -> Outcome:
    """Calls a function on every rank of a job.

    Args:
        function: Module-level function to call.
        args: Its arguments.
        num_processes: Ranks.
        limit_s: Seconds after which all of them are ended.
    """
    # Forked: what this process has imported need not be imported again. It computes nothing, so no threads are lost.
    context = get_context("fork")
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_job, args=(theirs, Path(folder), num_processes, function, args))
        process.start()
        theirs.close()
        value, failure = None, None
        try:
            if ours.poll(limit_s):
                value = ours.recv()
                process.join(GRACE_S)
            else:
                failure = f"not done after {limit_s:g} s; all ranks were ended"
        except EOFError:
            process.join(GRACE_S)
        finally:
            _end(cast(int, process.pid))
            process.join()
        said = (Path(folder) / "stderr").read_text(errors="replace").splitlines()
    if value is None and failure is None:
        errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        failure = errors[-1] if errors else f"ended with exit code {process.exitcode}: {' '.join(said[-1:])}"
    warnings = dict.fromkeys(line.removeprefix("warning: ") for line in said if line.startswith("warning: "))
    return Outcome(value=value, failure=failure, warnings=tuple(warnings), time_s=time.monotonic() - start_s)


GRACE_S = 10.0
"""Seconds that ranks have to end by themselves once there is a result."""


def _job(
    connection: Connection, folder: Path, num_processes: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Runs in a process of its own, whose ranks share its process group."""
    os.setpgid(0, 0)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    tempfile.tempdir = str(folder)
    connection.send(run(function, *args, num_processes=num_processes, debug=False))


def _end(leader: int) -> None:
    """Ends a job and its ranks, if any of them is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
