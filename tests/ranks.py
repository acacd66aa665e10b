"""Ranks for tests: processes over gloo on this machine, forked once and shared between tests."""

import atexit
import gc
import os
import pickle
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

TIMEOUT_S = 60.0
MANY_THREADS = 32
"""Of a rank that waits for a call: torch still refers to groups of earlier ones, whose threads wake up all the time."""

# A fork server forks ranks from a process that has imported torch and run nothing, so no thread pool of the
# test process is inherited half-way.
_context = get_context("forkserver")
# torch._dynamo costs a rank seconds where it imports it itself, at its first optimizer.
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "parallel", "checkpoint"]
)
_num_frozen = 0
"""How many modules a rank had imported when its collector last took the rest of its objects for lasting."""
_pools: dict[int, "_Pool"] = {}


class RankError(AssertionError):
    """A rank raised; the message holds the traceback of each rank that did."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Calls a module-level function on every rank of a fresh default process group.

    Args:
        world_size: Number of ranks.
        function: What to call; imported by name on the ranks.
        args: Its arguments, pickled.
        timeout_s: Seconds after which the ranks are killed.

    Returns:
        What it returned, by rank.

    Raises:
        RankError: If a rank raised, died or did not finish.
    """
    if world_size in _pools and (died := _pools[world_size].died()):
        warnings.warn(f"ranks died while they waited for a call, and are forked anew: {died}", stacklevel=2)
        _pools.pop(world_size).kill()
    if world_size not in _pools:
        _pools[world_size] = _Pool(world_size)
    try:
        outcomes = _pools[world_size].call(function, args, timeout_s)
    except RankError:
        _pools.pop(world_size).kill()
        raise
    failures = [f"rank {rank}:\n{text}" for rank, (failed, text) in enumerate(outcomes) if failed]
    if failures or _pools[world_size].is_worn():
        _pools.pop(world_size).kill()
    if failures:
        raise RankError("\n".join(failures))
    return [value for _, value in outcomes]


class _Pool:
    """Processes that wait for functions to run."""

    def __init__(self, world_size: int) -> None:
        self.num_calls = 0
        # Held by this process, at a port that the system picks: no rank can lose a race for it.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [_context.Pipe() for _ in range(world_size)]
        self.connections = [ours for ours, _ in pipes]
        self.processes = [
            _context.Process(target=_serve, args=(rank, world_size, self.store.port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[tuple[bool, Any]]:
        """Runs one function everywhere and returns (failed, result or traceback) by rank."""
        self.num_calls += 1
        port = _free_port()
        for connection in self.connections:
            connection.send_bytes(pickle.dumps((self.num_calls, port, os.getcwd(), function, args)))
        outcomes: dict[int, tuple[bool, Any]] = {}
        while len(outcomes) < len(self.connections):
            waiting = [each for rank, each in enumerate(self.connections) if rank not in outcomes]
            ready = wait(waiting, timeout=timeout_s)
            if not ready:
                missing = sorted(set(range(len(self.connections))) - set(outcomes))
                raise RankError(f"ranks {missing} did not finish in {timeout_s} s; the others: {outcomes}")
            for rank in [rank for rank, each in enumerate(self.connections) if each in ready]:
                try:
                    # From our own ranks, over a pipe that nobody else has.
                    outcomes[rank] = pickle.loads(self.connections[rank].recv_bytes())
                except EOFError:
                    self.processes[rank].join(5)
                    outcomes[rank] = (True, f"died with exit code {self.processes[rank].exitcode}")
                if outcomes[rank][0]:
                    # The others may wait for this rank in a collective; give them a moment to notice.
                    timeout_s = min(timeout_s, 10.0)
        return [outcomes[rank] for rank in range(len(self.connections))]

    def died(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended, by rank; others would wait for them, and get no call."""
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def is_worn(self) -> bool:
        """Whether ranks have kept many threads of earlier calls: FSDP1 keeps units whose parameters are all frozen."""
        # Where the system does not show threads, ranks just become slower.
        shown = [Path(f"/proc/{each.pid}/task") for each in self.processes]
        return any(each.is_dir() and len(list(each.iterdir())) > MANY_THREADS for each in shown)

    def kill(self) -> None:
        """Ends the processes at once."""
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, world_size: int, store_port: int, connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    # What is imported by now need not be looked at after each call.
    gc.freeze()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    while True:
        try:
            number, port, folder, function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        # A test may have gone elsewhere since the ranks were forked, or before.
        os.chdir(folder)
        # For code that leaves the group and starts another one from the environment.
        os.environ["MASTER_PORT"] = str(port)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(number), store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            outcome = (False, function(*args))
        except BaseException:
            outcome = (True, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _forget()
        connection.send_bytes(pickle.dumps(outcome))


def _forget() -> None:
    """Starts afresh for the next call.

    Lets go of every process group (each has threads, which go on waking up while anything refers to it) and of what the
    compiler has learned (it makes sizes symbols once it has met two of them).
    """
    global _num_frozen
    import torch
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # Private: DTensor keeps results for a mesh, and would give an equal mesh of the next call dead groups.
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    torch.compiler.reset()
    # Models with hooks refer to themselves.
    gc.collect()
    # Modules that this call has imported need not be looked at again.
    if len(sys.modules) > _num_frozen:
        gc.freeze()
        _num_frozen = len(sys.modules)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@atexit.register
def _end_pools() -> None:
    for pool in _pools.values():
        pool.kill()
