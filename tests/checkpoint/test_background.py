"""Saving in the background: what is saved, when errors surface, and that memory is used again."""

import gc
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import BackgroundSaver, Retention, TrainState, filesystem, latest, load, save, writer
from checkpoint.save_plan import SavePlan
from parallel import ParallelConfig
from parallel.config import DataParallel
from tests.checkpoint import states
from tests.parallel.small_model import build
from tests.ranks import run_ranks


@contextmanager
def held(name: str = "rename") -> Iterator[threading.Event]:
    """Holds saves before a call of the file system until the event is set."""
    event, call = threading.Event(), getattr(filesystem, name)

    def wait(*args: Any) -> Any:
        assert event.wait(60)
        return call(*args)

    with patch.object(filesystem, name, wait):
        try:
            yield event
        finally:
            event.set()


def failing(*args: Any) -> None:
    raise OSError(5, "Input/output error")


def save_and_change(folder: Path, layout: str) -> list[str]:
    """Changes all tensors and counts while a save is under way."""
    states.forget_meshes()
    state = states.fill(states.new_state(layout), seed=1)
    with BackgroundSaver(folder) as saver:
        with held("create") as event:
            saver.save(state)
            assert saver.is_writing
            states.fill(state, seed=2)
            event.set()
            assert saver.finish() == folder / "step-00000043"
        assert not saver.is_writing
        load(folder, state)
        wrong = states.wrong_tensors(state, seed=1)
        assert (state.step, state.num_tokens) == (43, 1001)
    return wrong


@pytest.mark.parametrize(("layout", "world_size"), [("one process", 1), ("fsdp 2", 2), ("hsdp 2 x 2", 4)])
def test_what_changes_after_the_call_is_not_mixed_in(tmp_path: Path, layout: str, world_size: int) -> None:
    if world_size == 1:
        assert save_and_change(tmp_path, layout) == []
    else:
        assert run_ranks(world_size, save_and_change, tmp_path, layout) == [[]] * world_size


def test_the_bytes_are_those_of_a_blocking_save(tmp_path: Path) -> None:
    state = states.fill(states.new_state())
    blocking = save(tmp_path / "blocking", state)
    with BackgroundSaver(tmp_path / "background") as saver:
        saver.save(state)
    for name in os.listdir(blocking):
        assert (blocking / name).read_bytes() == (tmp_path / "background" / blocking.name / name).read_bytes()


def test_one_save_is_under_way_at_a_time_and_the_end_waits_for_it(tmp_path: Path) -> None:
    state = states.fill(states.new_state())
    with BackgroundSaver(tmp_path, Retention(last=1)) as saver, held() as event:
        saver.save(state)
        assert latest(tmp_path) is None
        threading.Timer(0.2, event.set).start()
        state.step += 1
        saver.save(state)
        assert (tmp_path / "step-00000042").is_dir()
    assert os.listdir(tmp_path) == ["step-00000043"]


@pytest.mark.parametrize("next_call", ["finish", "save", "exit"])
def test_an_error_comes_with_the_next_call(tmp_path: Path, next_call: str) -> None:
    state = states.fill(states.new_state())
    save(tmp_path, state)
    state.step += 1
    with (
        patch.object(filesystem, "sync", failing),
        pytest.raises(OSError, match=r"could not save .*step-00000043: .*Input/output error"),
        BackgroundSaver(tmp_path) as saver,
    ):
        saver.save(state)
        if next_call != "exit":
            getattr(saver, next_call)(*([state] if next_call == "save" else []))
    assert os.listdir(tmp_path) == ["step-00000042"]
    # It was told of once; the next save succeeds.
    with BackgroundSaver(tmp_path) as saver:
        saver.save(state)
    assert latest(tmp_path) == tmp_path / "step-00000043"


def test_an_error_does_not_hide_another_one(tmp_path: Path) -> None:
    with (
        patch.object(filesystem, "sync", failing),
        pytest.raises(KeyError) as raised,
        BackgroundSaver(tmp_path) as saver,
    ):
        saver.save(states.fill(states.new_state()))
        raise KeyError("of the training")
    assert any("Input/output error" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(("module", "name"), [(filesystem, "sync"), (writer, "snapshot")])
def test_an_error_that_nobody_asks_for_is_a_warning(tmp_path: Path, module: ModuleType, name: str) -> None:
    saver = BackgroundSaver(tmp_path)
    with (
        patch.object(module, name, failing),
        pytest.warns(UserWarning, match=r"a save in the background failed: .*Input/output error"),
    ):
        saver.save(states.fill(states.new_state()))
        del saver
        gc.collect()


def test_host_memory_is_taken_once(tmp_path: Path) -> None:
    state = states.fill(states.new_state())
    addresses, snapshot = [], writer.snapshot

    def observed(planned: SavePlan, rooms: dict[str, Tensor]) -> SavePlan:
        copied = snapshot(planned, rooms)
        addresses.append([each.data_ptr() for each in copied.parts.values()])
        return copied

    with patch.object(writer, "snapshot", observed), BackgroundSaver(tmp_path) as saver:
        for _ in range(3):
            saver.save(state)
            state.step += 1
    assert len(addresses) == 3
    assert addresses == addresses[:1] * 3


def train_beside_a_save(folder: Path) -> tuple[float, list[str]]:
    """Collectives of training between those of a save; then saves whose write and whose copy fail on one rank."""
    states.forget_meshes()
    state = states.fill(states.new_state("fsdp 2"))
    total = torch.ones(())
    with BackgroundSaver(folder) as saver:
        saver.save(state)
        for _ in range(50):
            dist.all_reduce(total)
            total /= 2
        saver.finish()
        state.step += 1
        errors = []
        for owner, name in ((filesystem, "create"), (writer, "snapshot")):
            with patch.object(owner, name, failing) if dist.get_rank() == 1 else warnings.catch_warnings():
                saver.save(state)
                with pytest.raises(OSError) as raised:
                    saver.finish()
            errors.append(str(raised.value))
    return total.item(), errors


def test_training_communicates_beside_a_save_and_all_ranks_learn_of_one_failure(tmp_path: Path) -> None:
    first, second = run_ranks(2, train_beside_a_save, tmp_path)
    assert first == second
    assert first[0] == 1.0
    assert all("rank 1: [Errno 5] Input/output error" in error for error in first[1])
    assert os.listdir(tmp_path) == ["step-00000042"]


def questions_of_a_save(folder: Path, data_parallel: DataParallel) -> tuple[int, str]:
    """How often training waits for other ranks in a save; and what all hear where one cannot take its state apart."""
    states.forget_meshes()
    state = TrainState(trained=build(ParallelConfig(data_parallel=data_parallel)))
    with BackgroundSaver(folder) as saver:
        ranks = saver._ranks
        with ExitStack() as stack:
            asked = [
                stack.enter_context(patch.object(ranks, name, wraps=getattr(ranks, name)))
                for name in ("_highest", "gather", "broadcast")
            ]
            saver.save(state)
        saver.finish()
        if dist.get_rank() == 1:
            state.step = -1
        with pytest.raises(ValueError) as raised:
            saver.save(state)
    return sum(each.call_count for each in asked), str(raised.value)


@pytest.mark.parametrize(("data_parallel", "num_questions"), [("fsdp2", 1), ("fsdp1", 2)])
def test_training_waits_once_for_the_slowest_rank_and_again_where_tensors_are_made_together(
    tmp_path: Path, data_parallel: DataParallel, num_questions: int
) -> None:
    for asked, error in run_ranks(2, questions_of_a_save, tmp_path, data_parallel):
        assert asked == num_questions
        assert "rank 1: step=-1" in error
