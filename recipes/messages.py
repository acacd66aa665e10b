"""Says what went wrong in one message, on one rank."""

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from recipes.launchers import is_first_rank

USER_ERROR = 1
STOPPED = 75
"""Exit code of a run that a signal stopped, after a save if it had come to its steps, so that the same command goes on:
EX_TEMPFAIL of sysexits.h, "the user is invited to retry"."""
USER_ERRORS = (ValueError, OSError, FloatingPointError)
SAY_S = 0.5


@contextmanager
def one_message(*, debug: bool) -> Iterator[None]:
    """Ends the process with one message if what runs within fails, and shows each warning in a line, on rank 0.

    Args:
        debug: Show the traceback of a failure too.

    Raises:
        SystemExit: If it fails, or is interrupted.
    """
    with warnings.catch_warnings(), _after_first_rank():
        show_warnings(first_rank=is_first_rank())
        try:
            yield
        except KeyboardInterrupt:
            interrupted(signal.SIGINT)
        except Exception as error:
            fail(error, debug=debug)


@contextmanager
def _after_first_rank() -> Iterator[None]:
    """Lets rank 0 say what is wrong before another rank ends, upon which a launcher ends rank 0 too."""
    try:
        yield
    except SystemExit as end:
        if end.code and not is_first_rank():
            time.sleep(SAY_S)
        raise


def leave(code: int) -> NoReturn:
    """Ends the process, after rank 0 has said why.

    Args:
        code: Exit code.

    Raises:
        SystemExit: Always.
    """
    with _after_first_rank():
        raise SystemExit(code)


def fail(error: BaseException, *, debug: bool) -> NoReturn:
    """Ends the process with one message; users' errors are the same on all ranks, so rank 0 alone reports them.

    Args:
        error: What went wrong.
        debug: Show the traceback too.

    Raises:
        SystemExit: Always.
    """
    if isinstance(error, BrokenPipeError):
        # Whoever read the output has gone; Python would complain again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(USER_ERROR)
    if debug:
        traceback.print_exception(error)
    if debug or is_first_rank() or not isinstance(error, USER_ERRORS):
        print(f"error: {describe(error)}", file=sys.stderr, flush=True)
    raise SystemExit(USER_ERROR)


def describe(error: BaseException) -> str:
    """One line for a user: the message alone for errors that are written for users, with the type for others."""
    if isinstance(error, USER_ERRORS):
        return str(error)
    return f"{type(error).__name__}: {error} (run with --debug for the traceback)"


def interrupted(number: int) -> NoReturn:
    """Ends the process as shells expect of one that a signal ended; its ranks have ended.

    Args:
        number: The signal.

    Raises:
        SystemExit: Always.
    """
    restore_cursor()
    if is_first_rank():
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)


def stopped_early(number: int) -> NoReturn:
    """Ends the process of a run that a signal stopped before or after its steps; the same command goes on.

    Args:
        number: The signal.

    Raises:
        SystemExit: With `STOPPED`.
    """
    restore_cursor()
    if is_first_rank():
        where = f"stopped by {signal.Signals(number).name} outside of training steps"
        print(f"{where}: nothing more was saved; run again to go on", file=sys.stderr)
    raise SystemExit(STOPPED)


def restore_cursor() -> None:
    """Shows the cursor that the progress bar of a rank hid."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)


def show_warnings(*, first_rank: bool) -> None:
    """Ranks warn of the same things: rank 0 says each in a line, the others keep silent.

    Args:
        first_rank: Whether this is rank 0.
    """

    def show(message: Warning | str, *_: Any) -> None:
        if first_rank:
            print(f"warning: {message}", file=sys.stderr, flush=True)

    warnings.showwarning = show  # type: ignore[assignment]  # typeshed lists each argument
