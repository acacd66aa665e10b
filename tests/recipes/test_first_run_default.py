"""The main job on its default: what `make train` promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FIGURES = re.compile(r"bigram entropy (\d+\.\d+) nats a byte;\s+held-out loss (\d+\.\d+)")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_held_out_loss_ends_below_the_bigram_entropy_of_the_training_text(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.first_run", "--nproc", "2", "--folder", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = FIGURES.search(done.stdout)
    assert found is not None, done.stdout
    bigram, held_out = map(float, found.groups())
    assert held_out < bigram
