"""Counts what torch's allocator gives out, which compiled code cannot hide; temporaries of kernels are in it too."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_allocated(call: Callable[[], object]) -> int:
    """Most bytes in host memory that a call holds at a time beyond what was there before.

    Args:
        call: What to run.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    now = most = 0
    # Private: the public list of events has lost the order in which memory came and went.
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
