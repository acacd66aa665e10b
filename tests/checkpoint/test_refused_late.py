"""What refuses a checkpoint late in a load leaves the state as it was, on every rank."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpoint import TrainState, load, save
from tests.checkpoint import folders, states
from tests.checkpoint.states import Counter
from tests.ranks import run_ranks


class Picky(Counter):
    """Refuses a state after it has taken a part of it."""

    def __init__(self, position: int = 0, error: Exception | None = None) -> None:
        super().__init__(position)
        self.error = error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def with_schedule(state: TrainState, **stateful: Any) -> TrainState:
    assert state.optimizer is not None
    schedule = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: 1 / (1 + step))
    state.stateful = {"data": state.stateful["data"], "schedule": schedule, **stateful}
    return state


def everything(state: TrainState) -> dict[str, Any]:
    assert state.optimizer is not None
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state.optimizer.param_groups]
    stateful = {name: dict(each.state_dict()) for name, each in state.stateful.items()}
    return {"groups": groups, "stateful": stateful, "step": state.step, "num_tokens": state.num_tokens}


def saved_state(folder: Path) -> None:
    state = with_schedule(states.fill(states.new_state()), picky=Picky(3))
    for group in state.optimizer.param_groups if state.optimizer else []:
        group["lr"] = 0.125
    save(folder, state)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("the data differ"), "the data differ"),
        (KeyError("files"), r"stateful\.picky of the checkpoint is no state of a Picky \(KeyError: 'files'\)"),
        (TypeError("a list"), r"stateful\.picky .* \(TypeError: a list\); nothing was changed"),
        (AttributeError("x"), r"stateful\.picky .* \(AttributeError: x\)"),
    ],
)
def test_a_refusal_by_something_stateful_changes_nothing(tmp_path: Path, error: Exception, message: str) -> None:
    saved_state(tmp_path)
    state = with_schedule(states.fill(states.new_state(), seed=5), picky=Picky(1, error))
    before, random = everything(state), torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        load(tmp_path, state)
    assert states.wrong_tensors(state, seed=5) == []
    assert everything(state) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_a_refusal_leaves_a_fresh_optimizer_fresh(tmp_path: Path) -> None:
    saved_state(tmp_path)
    state = with_schedule(states.new_state(), picky=Picky(1, ValueError("no")))
    assert state.optimizer is not None
    rate = torch.tensor(0.75)
    state.optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ValueError, match="no"):
        load(tmp_path, state)
    assert len(state.optimizer.state) == 0
    assert state.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.75


def refuse_on_one_rank(folder: Path) -> tuple[str, dict[str, Any]]:
    states.forget_meshes()
    error = ValueError("the data differ") if dist.get_rank() == 1 else None
    state = with_schedule(states.fill(states.new_state("fsdp 2"), seed=5), picky=Picky(1, error))
    before = everything(state)
    with pytest.raises(ValueError) as raised:
        load(folder, state)
    assert states.wrong_tensors(state, seed=5) == []
    assert everything(state) == before
    return str(raised.value), before


def test_a_refusal_on_one_rank_is_the_same_error_on_all_and_changes_none(tmp_path: Path) -> None:
    saved_state(tmp_path)
    first, second = run_ranks(2, refuse_on_one_rank, tmp_path)
    assert first == second
    assert first[0] == "rank 1: the data differ"


def test_a_state_that_refuses_what_it_gave_is_told_of(tmp_path: Path) -> None:
    class Stuck(Counter):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise ValueError("never")

    saved_state(tmp_path)
    state = with_schedule(states.fill(states.new_state(), seed=5), picky=Stuck(1))
    with pytest.raises(ValueError, match="never") as raised:
        load(tmp_path, state)
    assert raised.value.__notes__ == ["stateful.picky could not be put back (ValueError('never')); build it anew"]


def test_the_learning_rate_that_a_schedule_sets_stands_above_the_saved_one(tmp_path: Path) -> None:
    class Schedule(Counter):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert state.optimizer is not None
            state.optimizer.param_groups[0]["lr"] = 0.5

    save(tmp_path, states.fill(states.new_state()))
    state = states.new_state()
    state.stateful = {"data": Schedule()}
    load(tmp_path, state)
    assert state.optimizer is not None
    assert [group["lr"] for group in state.optimizer.param_groups] == [0.5, 1e-3]


def test_a_file_with_a_broken_header_names_the_folder_and_the_remedy(tmp_path: Path) -> None:
    save(tmp_path, states.fill(states.new_state()))
    newest = save(tmp_path, states.fill(states.new_state(), seed=1))
    with open(newest / "rank-00000.safetensors", "r+b") as file:
        file.write(os.urandom(64))
    state = states.fill(states.new_state(), seed=5)
    before = everything(state)
    with pytest.raises(ValueError) as raised:
        load(newest, state)
    assert "rank-00000.safetensors is damaged: bytes 0 to 16384, of the header" in str(raised.value)
    assert f"delete the damaged folder {newest}, and a run goes on from the checkpoint before it" in str(raised.value)
    assert everything(state) == before


def test_something_stateful_whose_saved_state_is_no_mapping_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, states.new_state())
    folders.rewrite(path, lambda manifest: manifest["header"]["stateful"].update(more=[1]))
    with pytest.raises(ValueError, match="'stateful': 'more' must be of type dict"):
        load(path, states.new_state())
    monkeypatch.setattr(Counter, "state_dict", lambda self: [1])
    with pytest.raises(ValueError, match=r"stateful\.data must be a mapping, got list"):
        save(tmp_path, states.new_state())
