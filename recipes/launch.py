"""Starts the ranks of a job, or joins those that a launcher has started."""

import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from recipes.launchers import default_num_processes, is_first_rank, join_launcher
from recipes.messages import (
    STOPPED,
    USER_ERROR,
    USER_ERRORS,
    describe,
    interrupted,
    one_message,
    restore_cursor,
    show_warnings,
    stopped_early,
)
from recipes.signals import STOP_SIGNALS, EndedBySignal, ended_unheard, forward_signals, handlers
from recipes.user_files import import_user_file, imported_user_files

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# What gloo and NCCL say on a rank whose peer has died.
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "aborted")
GRACE_S = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


class RankError(Exception):
    """What a started rank tells the launcher: a message for the user."""


def run(function: Callable[..., Any], *args: Any, num_processes: int | None, debug: bool, resumes: bool = False) -> Any:
    """Calls a function on every rank and exits with a clear message if one fails.

    Args:
        function: Module-level function to call.
        args: Its arguments.
        num_processes: Ranks to start where no launcher did; None takes the default.
        debug: Show the traceback of a failure.
        resumes: Whether the same command goes on where this one was stopped.

    Returns:
        What it returned on rank 0, or on this rank where a launcher started it; it must be possible to pickle.

    Raises:
        SystemExit: If a rank fails; the code is not 0.
    """
    with one_message(debug=debug):
        if join_launcher():
            return _run_rank(function, args)
        with _forwarded(resumes) as forwarded:
            return _start_ranks(function, args, num_processes or default_num_processes(), debug, forwarded)


def _run_rank(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs a rank that a launcher started."""
    with handlers(SIGNALS, signal.SIG_DFL):
        try:
            result = function(*args)
        except USER_ERRORS:
            _leave_group()
            raise
        except RuntimeError as error:
            _wait_for_cause(error)
            raise
        _leave_group()
        return result


@contextmanager
def _forwarded(resumes: bool) -> Iterator[list[int]]:
    """Sends signals on to ranks; one that ends them before they listen to it leaves nothing that a run must know."""
    try:
        with forward_signals(SIGNALS) as came:
            yield came
    except EndedBySignal as end:
        if resumes and end.number in STOP_SIGNALS:
            stopped_early(end.number)
        interrupted(end.number)


def _start_ranks(
    function: Callable[..., Any], args: tuple[Any, ...], num_processes: int, debug: bool, forwarded: Sequence[int]
) -> Any:
    """Runs all ranks of a job on this machine."""
    import torch
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not debug:
        _silence_launcher()
    # More threads than cores would fight: ranks share the machine.
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with _temporary_folder() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            run_id=str(os.getpid()),
            start_method=_start_method(),
            monitor_interval=0.1,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            # On its signals it ends the ranks, but they may want to save first; it does not take an empty list.
            signals_to_handle="SIGQUIT",
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*use of fork.*")
                # Bytes, so that a rank which starts from nothing can first import what they speak of.
                call = bytes(ForkingPickler.dumps((function, args)))
                return elastic_launch(config, _call)(call, imported_user_files())[0]
        except ChildFailedError as error:
            ended_by = -error.get_first_failure()[1].exitcode
            if ended_unheard(ended_by, forwarded):
                raise EndedBySignal(ended_by) from error
            if forwarded:
                interrupted(forwarded[0])
            _report(*error.get_first_failure(), debug=debug)
        except SignalException as error:
            interrupted(error.sigval)


def _report(rank: int, failure: "ProcessFailure", *, debug: bool) -> NoReturn:
    """Prints why a rank failed, and exits."""
    details: dict[str, Any] = failure.message if isinstance(failure.message, dict) else {"message": failure.message}
    if debug and "extraInfo" in details:
        print(details["extraInfo"]["py_callstack"], file=sys.stderr)
    message = details["message"].removeprefix(f"{RankError.__name__}: ")
    if failure.exitcode < 0:
        message = f"rank {rank} was ended by {failure.signal_name()}"
        if failure.exitcode == -signal.SIGKILL:
            message += "; where nobody sent it, the machine ran out of memory"
    restore_cursor()
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(USER_ERROR)


def _silence_launcher() -> None:
    """Keeps torch's launcher from logging the whole failure, of which this module prints the cause in one line."""
    of_launcher = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    # One by one, because they have levels of their own.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(of_launcher):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder for all that torch's launcher writes, since it leaves its logs and, after a failure, more behind."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before


def _start_method() -> str:
    """Forked ranks start in a tenth of the time; CUDA does not survive a fork."""
    import torch

    return "spawn" if torch.cuda.is_available() else "fork"


def _call(call: bytes, user_files: list[str]) -> Any:
    """Runs on a started rank."""
    launcher = os.getppid()
    # Python's handlers wait for the end of a collective, which may never come.
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    tempfile.tempdir = None
    show_warnings(first_rank=is_first_rank())
    try:
        missing = set(user_files) - set(imported_user_files())
        for path in user_files:
            if path in missing:
                import_user_file(Path(path))
        function, args = ForkingPickler.loads(call)
        result = function(*args)
    except Exception as error:
        _wait_for_cause(error)
        raise RankError(describe(error)) from error
    _leave_group()
    if os.getppid() != launcher:
        # Killed, upon which a signal has told this rank to stop; torch would wait for ever until it takes the result.
        raise SystemExit(STOPPED)
    return result


def _wait_for_cause(error: Exception) -> None:
    """Gives a rank that lost its peer time to be ended by the launcher, which reports whichever rank ends first."""
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER):
        time.sleep(GRACE_S)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
