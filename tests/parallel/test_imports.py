"""What only other features need is imported when it is used."""

import subprocess
import sys

CODE = """
import sys
import torch.distributed.fsdp
before = set(sys.modules)
import parallel
print(*sorted(name for name in set(sys.modules) - before if name.partition(".")[0] != "parallel"))
"""


def test_importing_parallel_loads_nothing_beyond_what_fully_shard_needs() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
