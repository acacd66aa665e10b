"""Measures the peak memory of this process."""

import resource
import sys
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """Peak memory so far: what torch allocated on a GPU, the resident memory of this process on a CPU.

    Args:
        device: Where the process trains.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss survives exec, so it can be that of a bigger process which started this one; VmHWM does not.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum if sys.platform == "darwin" else maximum * 1024
