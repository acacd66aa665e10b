"""After a power failure at any point of a save, one of the two neighbours loads; after the save, the new one."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint import Retention, latest, save
from tests.checkpoint.disk import Disk, Loss, named
from tests.checkpoint.file_calls import before_each_call
from tests.checkpoint.test_kill import loaded_seed, prepared, tiny_state
from tests.ranks import run_ranks

LOSSES = [
    # All that was not synced; bytes alone, so that names stand for empty files; names alone; and some of each.
    Loss(names=1, content=1),
    Loss(names=0, content=1),
    Loss(names=1, content=0),
    Loss(names=0.5, content=0.5),
]

Calls = list[tuple[int, tuple[Any, ...]]]
"""When, and what."""


def recorded(folder: Path, step: int, world_size: int) -> Calls:
    """Saves seed 2 and tells what this rank did."""
    calls: Calls = []

    def before(call: str, *args: Any) -> None:
        calls.append((time.monotonic_ns(), named(call, args)))

    with before_each_call(before):
        save(folder, tiny_state(2, step, world_size), Retention(last=1))
    return calls


def record(folder: Path, step: int, world_size: int) -> list[tuple[Any, ...]]:
    """Calls of all ranks, in the order in which they were made; the clock is the same for all processes."""
    if world_size == 1:
        calls = recorded(folder, step, 1)
    else:
        calls = [call for of_rank in run_ranks(world_size, recorded, folder, step, world_size) for call in of_rank]
    return [call for _, call in sorted(calls, key=lambda each: each[0])]


@pytest.fixture
def replay(tmp_path: Path) -> Callable[[Path, int, int, set[int | None]], None]:
    """Records a save into a folder within `tmp_path`/disk and holds what is left after each call against seeds."""

    def run(folder: Path, step: int, world_size: int, neighbours: set[int | None]) -> None:
        root = tmp_path / "disk"
        disk = Disk(root)
        calls = record(folder, step, world_size)
        for number in range(len(calls) + 1):
            for loss in LOSSES:
                left = tmp_path / "left"
                disk.write_to(left, loss)
                found = left / folder.relative_to(root)
                done = number == len(calls)
                assert seed_of(found) in ({2} if done else neighbours), (loss, calls[:number])
                if loss == LOSSES[0]:
                    save(found, tiny_state(3, 3), Retention(last=1))
                    assert loaded_seed(found) == 3
                    assert [each.name for each in found.iterdir()] == ["step-00000003"]
                shutil.rmtree(left)
            if number < len(calls):
                disk.apply(*calls[number])

    return run


def seed_of(folder: Path) -> int | None:
    """What loads; None if nothing is there."""
    return None if latest(folder) is None else loaded_seed(folder)


@pytest.mark.parametrize(("step", "world_size"), [(2, 1), (1, 1), (2, 2)], ids=["prune", "replace", "prune on 2 ranks"])
def test_a_power_failure_leaves_one_of_the_neighbours(replay: Any, tmp_path: Path, step: int, world_size: int) -> None:
    (tmp_path / "disk").mkdir()
    replay(prepared(tmp_path / "disk" / "run"), step, world_size, {1, 2})


def test_the_first_save_lasts_with_all_folders_that_lead_to_it(replay: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    replay(tmp_path / "disk" / "runs" / "mine" / "checkpoints", 2, 1, {None, 2})


def test_the_model_of_a_disk_forgets_what_is_not_synced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    file = tmp_path / "disk" / "a"
    left: list[dict[str, bytes]] = []
    calls: list[tuple[Any, ...]] = [
        ("create", file),
        ("write", file, b"12"),
        ("sync", file),
        ("sync_folder", disk.root),
    ]
    for index, call in enumerate(calls):
        disk.apply(*call)
        target = tmp_path / f"left-{index}"
        disk.write_to(target, Loss(names=1, content=1))
        left.append({each.name: each.read_bytes() for each in target.iterdir()})
    assert left == [{}, {}, {}, {"a": b"12"}]
