"""Starts the ranks of a job, or joins those that a launcher has started."""

import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# For each launcher: the variables in which it names rank, world size, local rank and local world size.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}
USER_ERROR = 1
USER_ERRORS = (ValueError, OSError)
# What gloo and NCCL say on a rank whose peer has died.
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "aborted")
GRACE_S = 5.0


def join_launcher() -> bool:
    """Takes over the ranks of a launcher, if one has started this process.

    Returns:
        Whether it has; then the variables that torch reads (`RANK`, `WORLD_SIZE`, ...) are set.

    Raises:
        ValueError: If a launcher names ranks but no address at which they meet.
    """
    for launcher, (rank, world_size, local_rank, local_world_size) in LAUNCHERS.items():
        if rank not in os.environ or world_size not in os.environ:
            continue
        if launcher != "torchrun" and os.environ[world_size] == "1":
            continue
        # srun writes the tasks of each node as "4(x2)".
        on_node = os.environ.get(local_world_size, os.environ[world_size]).split("(")[0]
        os.environ |= {
            "RANK": os.environ[rank],
            "WORLD_SIZE": os.environ[world_size],
            "LOCAL_RANK": os.environ.get(local_rank, "0"),
            "LOCAL_WORLD_SIZE": on_node,
        }
        if "MASTER_ADDR" not in os.environ:
            raise ValueError(
                f"{launcher} started this process, but MASTER_ADDR is not set; set it to the host of rank 0 "
                "(and MASTER_PORT to a free port there)"
            )
        os.environ.setdefault("MASTER_PORT", "29500")
        return True
    return False


def default_num_processes() -> int:
    """Ranks to start on this machine: one for each GPU, or 2 without any."""
    import torch

    return torch.cuda.device_count() or 2


def run(function: Callable[..., Any], *args: Any, num_processes: int | None, debug: bool) -> Any:
    """Calls a function on every rank and exits with a clear message if one fails.

    Args:
        function: Module-level function to call.
        args: Its arguments.
        num_processes: Ranks to start where no launcher did; None takes the default.
        debug: Show the traceback of a failure.

    Returns:
        What it returned on rank 0, or on this rank where a launcher started it; it must be possible to pickle.

    Raises:
        SystemExit: If a rank fails; the code is not 0.
    """
    try:
        joined = join_launcher()
    except ValueError as error:
        fail(error, debug=debug)
    if joined:
        return _run_rank(function, args, debug)
    return _start_ranks(function, args, num_processes or default_num_processes(), debug)


def world_size_to_come(num_processes: int | None) -> int:
    """Ranks that the job will have: the launcher's, or those that `run` will start.

    Args:
        num_processes: As in `run`.

    Raises:
        ValueError: If that number is not positive, or a launcher has left out the address of rank 0.
    """
    if join_launcher():
        return int(os.environ["WORLD_SIZE"])
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"nproc={num_processes} must be at least 1")
    return num_processes or default_num_processes()


def is_first_rank() -> bool:
    """Whether this process speaks for the job: it is rank 0, or no launcher has started it."""
    return os.environ.get("RANK", "0") == "0"


def fail(error: BaseException, *, debug: bool) -> NoReturn:
    """Ends the process with one message; users' errors are the same on all ranks, so rank 0 alone reports them.

    Args:
        error: What went wrong.
        debug: Show the traceback too.

    Raises:
        SystemExit: Always.
    """
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


def _run_rank(function: Callable[..., Any], args: tuple[Any, ...], debug: bool) -> Any:
    """Runs a rank that a launcher started."""
    _show_warnings(first_rank=is_first_rank())
    try:
        return function(*args)
    except Exception as error:
        fail(error, debug=debug)
    finally:
        _leave_group()


def _start_ranks(function: Callable[..., Any], args: tuple[Any, ...], num_processes: int, debug: bool) -> Any:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not debug:
        # It logs the whole failure; this module prints its first cause in one line.
        for name in ("torch.distributed", "torch.multiprocessing"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # More threads than cores would fight: ranks share the machine.
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id=str(os.getpid()),
        # Forked ranks start in a tenth of the time; CUDA does not survive a fork.
        start_method="spawn" if torch.cuda.is_available() else "fork",
        monitor_interval=0.1,
        max_restarts=0,
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*use of fork.*")
            return elastic_launch(config, _call)(function, args)[0]
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        _report(first, debug)


def _report(failure: "ProcessFailure", debug: bool) -> NoReturn:
    """Prints why a rank failed, and exits."""
    details: dict[str, Any] = failure.message if isinstance(failure.message, dict) else {"message": failure.message}
    if debug and "extraInfo" in details:
        print(details["extraInfo"]["py_callstack"], file=sys.stderr)
    message = details["message"].removeprefix("ValueError: ").removeprefix("OSError: ")
    if failure.exitcode < 0:
        message = f"rank {failure.local_rank} was ended by {failure.signal_name()}"
    elif message == details["message"] and not debug:
        message += " (run with --debug for the traceback)"
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(USER_ERROR)


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs on a started rank."""
    _show_warnings(first_rank=is_first_rank())
    try:
        result = function(*args)
    except RuntimeError as error:
        if any(sign in str(error) for sign in LOST_PEER):
            # The launcher reports whichever rank ends first: leave that to the cause, and be ended by the launcher.
            time.sleep(GRACE_S)
        raise
    _leave_group()
    return result


def _show_warnings(*, first_rank: bool) -> None:
    """Ranks warn of the same things: rank 0 says each in a line, the others keep silent."""

    def show(message: Warning | str, *_: Any) -> None:
        if first_rank:
            print(f"warning: {message}", file=sys.stderr, flush=True)

    warnings.showwarning = show  # type: ignore[assignment]  # typeshed lists each argument


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
