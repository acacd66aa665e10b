"""What fits is restored whole; what does not fit changes nothing."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint import TrainState, load, save
from tests.checkpoint import states
from tests.checkpoint.states import Counter, Toy
from tests.ranks import run_ranks


def test_one_error_lists_missing_unexpected_shape_and_dtype_and_changes_nothing(tmp_path: Path) -> None:
    model = Toy(vocab_size=12)
    model.norm = nn.LayerNorm(6)  # type: ignore[assignment]  # the point of the test
    model.up = nn.Linear(6, 10, dtype=torch.float64)
    del model.pair
    written = states.fill(states.new_state(model=model))
    written.stateful = {"old": Counter()}
    save(tmp_path, written)
    state = states.fill(states.new_state(), seed=5)
    state.stateful = {"new": Counter()}
    with pytest.raises(ValueError) as raised:
        load(tmp_path, state)
    sections = dict(re.findall(r"^(\S[^\n]*) \(\d+\):\n((?:  .*\n?)+)", str(raised.value), re.MULTILINE))
    listed = {heading: [line.split(":")[0].strip() for line in body.splitlines()] for heading, body in sections.items()}
    pair, embed = ("pair", "pair.step", "pair.exp_avg", "pair.exp_avg_sq"), ("embed.weight", "head.weight")
    assert set(listed["missing from the checkpoint"]) == {
        f"{'optimizer' if name.count('.') else 'model'}.{name}" for name in pair
    } | {"stateful.new"}
    assert "model.norm.bias" in listed["in the checkpoint only"]
    assert "stateful.old" in listed["in the checkpoint only"]
    assert {f"model.{name}" for name in embed} <= set(listed["of another shape"])
    assert "model.embed.weight: [12, 6], needed [11, 6]" in str(raised.value)
    assert {"model.up.weight", "optimizer.up.bias.exp_avg"} <= set(listed["of another dtype"])
    assert "pair: group none in the checkpoint, group 0 in the optimizer" in str(raised.value)
    assert str(tmp_path / "step-00000042") in str(raised.value)
    assert states.wrong_tensors(state, seed=5) == []
    assert (state.step, state.num_tokens) == (47, 1005)


def test_every_rank_gets_the_list(tmp_path: Path) -> None:
    save(tmp_path, states.fill(states.new_state(model=Toy(vocab_size=12))))
    first, second = run_ranks(2, message_of_load, tmp_path)
    assert first == second
    assert "model.head.weight: [12, 6], needed [11, 6]" in first


def message_of_load(folder: Path) -> str:
    states.forget_meshes()
    state = states.fill(states.new_state("fsdp 2"), seed=5)
    with pytest.raises(ValueError) as raised:
        load(folder, state)
    assert states.wrong_tensors(state, seed=5) == []
    return str(raised.value)


def test_saving_and_loading_an_unstepped_optimizer_does_not_advance_it(tmp_path: Path) -> None:
    for state in (states.new_state(), states.new_state()):
        assert state.optimizer is not None
        if (tmp_path / "step-00000000").exists():
            load(tmp_path, state)
        save(tmp_path, state)
        assert len(state.optimizer.state) == 0
        untouched = states.new_state()
        states.step(untouched)
        states.step(state)
        for ours, theirs in zip(states.tensors_of(state).values(), states.tensors_of(untouched).values(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_stepped_optimizer_refuses_a_checkpoint_of_an_unstepped_one(tmp_path: Path) -> None:
    save(tmp_path, states.new_state())
    state = states.fill(states.new_state())
    with pytest.raises(ValueError, match=r"(?s)missing.*optimizer\.embed\.weight\.exp_avg"):
        load(tmp_path, state)
    assert states.wrong_tensors(state) == []


def test_a_stepped_optimizer_is_rewound(tmp_path: Path) -> None:
    save(tmp_path, states.fill(states.new_state()))
    state = states.fill(states.new_state(), seed=3)
    load(tmp_path, state)
    assert states.wrong_tensors(state) == []


def test_training_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    uninterrupted = states.fill(states.new_state())
    save(tmp_path, uninterrupted)
    resumed = states.new_state()
    load(tmp_path, resumed)
    for state in (uninterrupted, resumed):
        states.step(state)
    for ours, theirs in zip(
        states.tensors_of(resumed).values(), states.tensors_of(uninterrupted).values(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_momentum_and_learning_rate_tensors_return(tmp_path: Path) -> None:
    def sgd(lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=torch.tensor(lr), momentum=0.9)

    model = Toy()
    state = states.new_state(model=model)
    state.optimizer = sgd(0.25)
    states.step(state)
    save(tmp_path, state)
    before = {name: tensor.clone() for name, tensor in states.tensors_of(state).items()}
    state.optimizer = sgd(1.0)
    load(tmp_path, state)
    after = states.tensors_of(state)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert isinstance(state.optimizer.param_groups[0]["lr"], torch.Tensor)
    assert state.optimizer.param_groups[0]["lr"].item() == 0.25


def test_how_a_step_is_computed_stays_as_the_optimizer_was_built(tmp_path: Path) -> None:
    written = states.new_state()
    written.optimizer = states.new_optimizer(written.trained, foreach=True)
    save(tmp_path, written)
    state = states.new_state()
    state.optimizer = states.new_optimizer(state.trained, foreach=False)
    load(tmp_path, state)
    assert [group["foreach"] for group in state.optimizer.param_groups] == [False, False]


def test_a_learning_rate_schedule_goes_on(tmp_path: Path) -> None:
    def rates(steps: int) -> list[float]:
        result = []
        for _ in range(steps):
            assert state.optimizer is not None
            states.step(state)
            scheduler.step()
            result.append(state.optimizer.param_groups[0]["lr"])
        return result

    def with_scheduler() -> tuple[TrainState, torch.optim.lr_scheduler.LambdaLR]:
        state = states.new_state()
        assert state.optimizer is not None
        scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: 1 / (1 + step))
        state.stateful = {"schedule": scheduler}
        return state, scheduler

    state, scheduler = with_scheduler()
    rates(3)
    save(tmp_path, state)
    expected = rates(3)
    state, scheduler = with_scheduler()
    load(tmp_path, state)
    assert rates(3) == expected


def test_a_gradient_scaler_goes_on(tmp_path: Path) -> None:
    def scaled(init_scale: float) -> tuple[TrainState, torch.amp.GradScaler]:
        state, scaler = states.new_state(), torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=7)
        # It takes its scale up when it is first used.
        scaler.scale(torch.ones(()))
        state.stateful = {"scaler": scaler}
        return state, scaler

    state, scaler = scaled(8.0)
    scaler.update(32.0)
    save(tmp_path, state)
    state, other = scaled(1.0)
    load(tmp_path, state)
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 32.0


def test_state_of_a_parameter_frozen_later_stays(tmp_path: Path) -> None:
    written = states.fill(states.new_state())
    written.trained.named_parameters()["up.weight"].requires_grad_(False)
    save(tmp_path, written)
    state = states.new_state()
    load(tmp_path, state)
    assert states.wrong_tensors(state) == []


def test_an_optimizer_on_one_side_only_is_refused(tmp_path: Path) -> None:
    state = states.fill(states.new_state())
    save(tmp_path / "with", state)
    optimizer, state.optimizer = state.optimizer, None
    save(tmp_path / "without", state)
    with pytest.raises(ValueError, match="the checkpoint has an optimizer, the state to load has none"):
        load(tmp_path / "with", state)
    state.optimizer = optimizer
    with pytest.raises(ValueError, match="the checkpoint has no optimizer, the state to load has one"):
        load(tmp_path / "without", state)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, object()]}, r"stateful\.data\.a\[1\] is a object"),
        ({"a": float("nan")}, r"stateful\.data\.a is nan"),
        ({"a": {1: 2}}, r"stateful\.data\.a has the key 1 of type int"),
        ({"a": torch.zeros(())}, r"stateful\.data\.a is a Tensor"),
    ],
)
def test_state_that_is_not_json_is_refused_by_name(
    tmp_path: Path, value: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counter, "state_dict", lambda self: value)
    with pytest.raises(ValueError, match=message):
        save(tmp_path, states.new_state())
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_of_another_model_in_the_optimizer_is_refused(tmp_path: Path) -> None:
    state = states.new_state()
    state.optimizer = torch.optim.SGD(Toy().parameters())
    with pytest.raises(ValueError, match="not the model's"):
        save(tmp_path, state)


def test_parameters_on_meta_are_refused(tmp_path: Path) -> None:
    save(tmp_path, states.new_state())
    with torch.device("meta"):
        state = states.new_state(model=Toy())
    with pytest.raises(ValueError, match="call materialize first"):
        load(tmp_path, state)


def test_ranks_that_differ_in_what_is_stored_once_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, message_of_unequal_save, tmp_path):
        assert "stateful.data on rank 1" in message
        assert "step on rank" not in message
    assert list(tmp_path.iterdir()) == []


def message_of_unequal_save(folder: Path) -> str:
    states.forget_meshes()
    state = states.new_state("fsdp 2")
    state.stateful = {"data": Counter(torch.distributed.get_rank())}
    with pytest.raises(ValueError) as raised:
        save(folder, state)
    return str(raised.value)


def test_unknown_parts_and_no_checkpoint_are_refused(tmp_path: Path) -> None:
    state = states.new_state()
    with pytest.raises(ValueError, match="legal: model, optimizer, progress, rng"):
        load(tmp_path, state, parts=("weights",))  # type: ignore[arg-type]  # what a user may write
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        load(tmp_path, state)
    with pytest.raises(ValueError, match="is not a folder"):
        load(tmp_path / "nowhere", state)
