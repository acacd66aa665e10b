"""A saver that is killed at any of its calls of the file system leaves one of the two neighbours, and the next save."""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checkpoint import Retention, TrainState, load, save
from tests.checkpoint import states
from tests.checkpoint.file_calls import killed_at

RETENTION = Retention(last=1)
GROUP_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Point:
    """Where a save is killed.

    Attributes:
        world_size: Ranks that save.
        step: Step that they save; step 1 is there before, so that it is replaced or pruned.
        rank: The rank that is killed.
        call: Its call, from 0.
        torn: Half-way through a write, not before it.
    """

    world_size: int
    step: int
    rank: int
    call: int
    torn: bool


class Tiny(nn.Module):
    """A tensor that is sharded unevenly, and one that is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Parameter(torch.zeros(7, 3))
        self.replicated = nn.Parameter(torch.zeros(4))


def tiny_state(seed: int, step: int, world_size: int = 1) -> TrainState:
    model = Tiny()
    for name, parameter in list(model.named_parameters()):
        values = states.value_of(name, parameter, seed)
        if world_size > 1:
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
            placement = Shard(0) if name == "sharded" else Replicate()
            values = distribute_tensor(values, mesh, [placement], src_data_rank=None)
        setattr(model, name, nn.Parameter(values))
    trained: Any = states.PlainTrained(model)
    return TrainState(trained=trained, stateful={"data": states.Counter(seed)}, step=step, num_tokens=seed)


def loaded_seed(folder: Path) -> int:
    """Loads the newest checkpoint, holds all of it against its seed, and tells that."""
    state = tiny_state(seed=99, step=0)
    load(folder, state)
    seed = state.num_tokens
    for name, parameter in state.trained.named_parameters().items():
        assert torch.equal(parameter, states.value_of(name, parameter, seed)), f"{name} is mixed"
    counter = state.stateful["data"]
    assert isinstance(counter, states.Counter)
    assert counter.position == seed
    return seed


def prepared(folder: Path) -> Path:
    """Step 1 of seed 1, and what an earlier crash left."""
    save(folder, tiny_state(seed=1, step=1))
    leftover = folder / ".step-00000001.tmp-0123abcd"
    leftover.mkdir()
    (leftover / "rank-00000.safetensors").write_bytes(b"half")
    return folder


def fork(function: Callable[..., Any], *args: Any) -> int:
    """Runs a function in a copy of this process, which must have no other threads."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function(*args)
    except BaseException:
        # As it should be where a peer was killed.
        os._exit(1)
    os._exit(0)


def save_as_rank(rank: int, world_size: int, folder: Path, step: int, point: Point | None) -> None:
    """Saves seed 2; writes the calls that it makes beside the folder if it is not to be killed."""
    if world_size > 1:
        store = dist.FileStore(f"{folder}.store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    state = tiny_state(2, step, world_size)
    if point is None:
        with killed_at(-1) as calls:
            save(folder, state, RETENTION)
        Path(f"{folder}.calls-{rank}").write_text("\n".join(calls))
    else:
        with killed_at(point.call, torn=point.torn) if rank == point.rank else nullcontext():
            save(folder, state, RETENTION)


def run_save(world_size: int, folder: Path, step: int, point: Point | None) -> list[int]:
    """Exit codes by rank; -9 for the killed one."""
    pids = [fork(save_as_rank, rank, world_size, folder, step, point) for rank in range(world_size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    Path(f"{folder}.store").unlink(missing_ok=True)
    return codes


def find_points(template: Path, world_size: int, step: int) -> list[Point]:
    folder = Path(shutil.copytree(template, template.with_name(f"count-{world_size}-{step}")))
    assert run_save(world_size, folder, step, None) == [0] * world_size
    assert loaded_seed(folder) == 2
    points = []
    for rank in range(world_size):
        for call, name in enumerate(Path(f"{folder}.calls-{rank}").read_text().splitlines()):
            points.append(Point(world_size, step, rank, call, torn=False))
            if name in ("write", "write_at"):
                points.append(Point(world_size, step, rank, call, torn=True))
    return points


def problem_at(point: Point, template: Path) -> str | None:
    """What is wrong after a save was killed at a point."""
    folder = Path(shutil.copytree(template, template.with_name("killed")))
    try:
        codes = run_save(point.world_size, folder, point.step, point)
        if codes[point.rank] != -9 or not set(codes) <= {-9, 0, 1}:
            return f"the ranks ended with {codes}"
        seed = loaded_seed(folder)
        if seed not in (1, 2):
            return f"seed {seed} was loaded"
        save(folder, tiny_state(seed=3, step=3), RETENTION)
        if loaded_seed(folder) != 3 or os.listdir(folder) != ["step-00000003"]:
            return f"the next save left {os.listdir(folder)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)
    return None


def sweep(connection: Connection, folder: Path, world_sizes: tuple[int, ...], every: int) -> None:
    """Sends the number of points tried, and what was wrong at which."""
    torch.set_num_threads(1)
    template = prepared(folder / "template")
    points = [
        point for world_size, step in product(world_sizes, (1, 2)) for point in find_points(template, world_size, step)
    ][::every]
    problems = [(point, problem) for point in points if (problem := problem_at(point, template))]
    connection.send((len(points), problems))


def run_sweep(folder: Path, world_sizes: tuple[int, ...], every: int, timeout_s: float) -> tuple[int, list[Any]]:
    """Sweeps in a process that has run nothing, so that it can be copied."""
    context = get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=sweep, args=(theirs, folder, world_sizes, every), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(timeout_s), f"the sweep took more than {timeout_s} s"
        result: tuple[int, list[Any]] = ours.recv()
        return result
    finally:
        process.kill()
        process.join()


def test_a_saver_killed_at_one_of_some_calls_leaves_one_of_the_neighbours(tmp_path: Path) -> None:
    num_points, problems = run_sweep(tmp_path, (1, 2), every=17, timeout_s=120)
    assert num_points >= 8
    assert problems == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_saver_killed_at_any_call_leaves_one_of_the_neighbours(tmp_path: Path) -> None:
    num_points, problems = run_sweep(tmp_path, (1, 2, 4), every=1, timeout_s=1800)
    assert num_points >= 200
    assert problems == []
