"""Measures what ranks on this machine's processors can do, in place of a data sheet."""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel import ParallelConfig, build_mesh
from parallel.planner.constants import CONSTANTS
from parallel.planner.hardware import CPU, Gpu
from recipes.compare.job import run_job

SIZE = 512
"""Rows and columns of the matrices that are multiplied."""
MIB = 2**20
COPIED_MIB, SENT_MIB = 64, 4
LIMIT_S = 60.0
REPEATS = 5


def measure_machine(num_ranks: int) -> Gpu:
    """An entry of the table of GPUs for ranks that share this machine's processors.

    Shares by which the planner multiplies figures of data sheets are divided out: what was measured is reached.

    Args:
        num_ranks: Ranks that will share it.
    """
    cores = len(os.sched_getaffinity(0))
    crowded = max(1.0, num_ranks / cores)
    matrix = torch.ones(SIZE, SIZE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        multiplied_s = _fastest_s(lambda: matrix @ matrix)
        block = torch.ones(COPIED_MIB * MIB // 4)
        copied_s = _fastest_s(block.clone)
    finally:
        torch.set_num_threads(threads)
    tflops = 2 * SIZE**3 / multiplied_s / 1e12 / crowded / CONSTANTS.matmul_share
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / num_ranks
    latency_s, bytes_per_s = _measure_link() if num_ranks > 1 else (1e-4, 1e9)
    link = bytes_per_s / 1e9 / CONSTANTS.link_share
    return Gpu(
        name=CPU,
        peak_tflops={"float32": tflops, "bfloat16": tflops},
        memory_gib=memory / 2**30,
        memory_gb_per_s=2 * COPIED_MIB * MIB / copied_s / 1e9 / crowded / CONSTANTS.memory_share,
        # Of which no limit follows.
        power_w=1e6,
        gpus_per_node=max(num_ranks, 1),
        node_link_gb_per_s=link,
        network_link_gb_per_s=link,
        hop_latency_us=latency_s * 1e6,
        # The ranks' memory is the host's.
        host_memory_gib=0.0,
    )


def _fastest_s(run: Callable[[], object]) -> float:
    times_s = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def _measure_link() -> tuple[float, float]:
    """Latency of a hop and bytes a second between two ranks."""
    outcome = run_job(_send, num_processes=2, limit_s=LIMIT_S)
    if outcome.failure is not None:
        raise ValueError(f"the link between ranks of this machine could not be measured: {outcome.failure}")
    small_s, large_s = outcome.value
    # An all-reduce of two ranks has two hops, and each sends all of it once.
    return small_s / 2, SENT_MIB * MIB / max(large_s - small_s, 1e-6)


def _send() -> tuple[float, float]:
    """Times of an all-reduce of one number and of a large tensor; every rank calls this."""
    build_mesh(ParallelConfig(), "cpu")
    small, large = torch.ones(1), torch.ones(SENT_MIB * MIB // 4)
    dist.all_reduce(small)
    small_s = _fastest_s(lambda: dist.all_reduce(small))
    return small_s, _fastest_s(lambda: dist.all_reduce(large))
