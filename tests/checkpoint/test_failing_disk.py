"""A call of the file system that fails on one rank is one error on all, and training can save again."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from checkpoint import Retention, latest, save
from tests.checkpoint.file_calls import before_each_call
from tests.checkpoint.test_kill import loaded_seed, tiny_state
from tests.ranks import run_ranks

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
LIMIT_S = 10.0


def save_with_each_call_failing(folder: Path, rank: int) -> list[tuple[str, int]]:
    """What each save raised, and the newest step after it; the n-th call fails in the n-th save, on one rank."""
    world_size, outcomes = dist.get_world_size(), []
    save(folder, tiny_state(0, 0, world_size), Retention(last=1))
    for number in range(1000):
        state, calls, raised = tiny_state(number + 1, number + 1, world_size), list[str](), ""

        def fail(call: str, *args: Any, number: int = number, calls: list[str] = calls) -> None:
            calls.append(call)
            if dist.get_rank() == rank and len(calls) == number + 1:
                code = ERRORS[number % len(ERRORS)]
                raise OSError(code, os.strerror(code))

        start_s = time.monotonic()
        with before_each_call(fail):
            try:
                save(folder, state, Retention(last=1))
            except OSError as error:
                raised = str(error)
        assert time.monotonic() - start_s < LIMIT_S
        newest = latest(folder)
        assert newest is not None
        outcomes.append((raised, int(newest.name.removeprefix("step-"))))
        reached = [len(calls) > number]
        dist.broadcast_object_list(reached, src=rank)
        if not reached[0]:
            break
    return outcomes


@pytest.mark.parametrize("rank", [0, 1])
def test_each_failing_call_is_one_error_on_all_ranks_and_the_previous_checkpoint_stands(
    tmp_path: Path, rank: int
) -> None:
    first, second = run_ranks(2, save_with_each_call_failing, tmp_path, rank)
    assert first == second
    assert len(first) > (15 if rank == 0 else 5)
    before = 0
    for step, (raised, newest) in enumerate(first, start=1):
        said = os.strerror(ERRORS[(step - 1) % len(ERRORS)])
        if not raised or raised.startswith("could not remove checkpoints older than"):
            # What fails after that does not take back a checkpoint that is complete.
            assert newest == step
        else:
            assert raised.startswith("could not ") and said in raised
            assert newest == before
        before = newest
    assert first[-1][0] == ""
    assert loaded_seed(tmp_path) == len(first)
    assert os.listdir(tmp_path) == [f"step-{len(first):08d}"]
