"""Measures what our packages add to the time until a run computes."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TORCH_ALONE = "import torch, torch.distributed.fsdp, torch.distributed.tensor.parallel"
OURS = "import parallel"

BARE_SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(torch.ones(16, 64)).sum().backward()
optimizer.step()
dist.destroy_process_group()
"""


def import_times_s(num_rounds: int) -> dict[str, list[float]]:
    """Seconds until a fresh interpreter has imported torch's parts alone, and our package.

    Args:
        num_rounds: Rounds.
    """
    return _interleave(
        {"torch alone": [sys.executable, "-c", TORCH_ALONE], "parallel": [sys.executable, "-c", OURS]}, num_rounds
    )


def first_step_times_s(num_rounds: int) -> dict[str, list[float]]:
    """Seconds of a whole command that takes one step on 2 ranks: a bare script under torchrun, and our recipe.

    Args:
        num_rounds: Rounds.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE_SCRIPT)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
        recipe = [sys.executable, "-m", "recipes.train", "llama_debug", "--nproc", "2"]
        recipe += ["--training.steps", "1", "--schedule.warmup-steps", "1", "--data.held-out-fraction", "0"]
        runs = {"bare torchrun script": torchrun, "recipes.train llama_debug": recipe}
        return _interleave(runs, num_rounds, output_folder=folder)


def _interleave(
    commands: dict[str, list[str]], num_rounds: int, output_folder: str | None = None
) -> dict[str, list[float]]:
    times_s: dict[str, list[float]] = {name: [] for name in commands}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # As for any user, the first round leaves compiled bytecode: torch's own was left by its installation.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for number in range(num_rounds + 1):
        for name, command in commands.items():
            if output_folder is not None and "recipes.train" in command:
                command = [*command, "--output.folder", f"{output_folder}/run-{number}"]
            start_s = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
            if number:  # the first round fills caches
                times_s[name].append(time.perf_counter() - start_s)
    return times_s


def median_difference_s(times_s: dict[str, list[float]]) -> float:
    """Median over rounds of how much longer the second contender took than the first.

    Args:
        times_s: Seconds by contender and round.
    """
    first, second = times_s.values()
    return statistics.median(mine - theirs for theirs, mine in zip(first, second, strict=True))
