"""A checkpoint of another optimizer is refused, and changes nothing."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adafactor, Adam, AdamW, RMSprop

from checkpoint import TrainState, load, save
from tests.checkpoint import folders, states

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(SGD, momentum=0.9),
    "AdamW": AdamW,
    "Adam": Adam,
    "amsgrad": partial(AdamW, amsgrad=True),
    "RMSprop": RMSprop,
    "centered": partial(RMSprop, centered=True),
    "betas": partial(AdamW, betas=(0.5, 0.5)),
}


def state_with(name: str, stepped: bool) -> TrainState:
    state = states.new_state()
    trainable = [each for each in state.trained.named_parameters().values() if each.requires_grad]
    state.optimizer = OPTIMIZERS[name](trainable, lr=0.5)
    if stepped:
        states.step(state)
    return state


def hyperparameters(state: TrainState) -> list[dict[str, Any]]:
    assert state.optimizer is not None
    return [{key: value for key, value in group.items() if key != "params"} for group in state.optimizer.param_groups]


def assert_refused(path: Path, state: TrainState, *messages: str) -> None:
    before = {name: tensor.clone() for name, tensor in states.tensors_of(state).items()}
    groups = hyperparameters(state)
    with pytest.raises(ValueError, match="does not fit the state to load; nothing was changed") as raised:
        load(path, state)
    for message in messages:
        assert message in str(raised.value)
    after = states.tensors_of(state)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert hyperparameters(state) == groups


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [
        ("SGD", "AdamW", "class SGD in the checkpoint, AdamW in the optimizer"),
        ("AdamW", "SGD", "class AdamW in the checkpoint, SGD in the optimizer"),
        ("AdamW", "Adam", "class AdamW in the checkpoint, Adam in the optimizer"),
        ("AdamW", "amsgrad", "group 0.amsgrad: False in the checkpoint, True in the optimizer"),
        ("amsgrad", "AdamW", "group 0.amsgrad: True in the checkpoint, False in the optimizer"),
        ("RMSprop", "centered", "group 0.centered: False in the checkpoint, True in the optimizer"),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, saved: str, current: str, message: str, stepped: bool
) -> None:
    save(tmp_path, state_with(saved, stepped=True))
    assert_refused(tmp_path, state_with(current, stepped), message)


def test_numbers_of_the_same_optimizer_are_taken_over(tmp_path: Path) -> None:
    save(tmp_path, state_with("betas", stepped=True))
    state = state_with("AdamW", stepped=False)
    load(tmp_path, state)
    assert hyperparameters(state)[0]["betas"] == (0.5, 0.5)


def rewrite(path: Path, change: Callable[[Any], Any]) -> Path:
    """Changes the optimizer in a manifest."""
    return folders.rewrite(path, lambda manifest: change(manifest["header"]["optimizer"]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"params": []}, "group 0.params: in the checkpoint only"),
        ({"color": 1}, "group 0.color: in the checkpoint only"),
        ({"lr": "fast"}, "group 0.lr: 'fast' in the checkpoint, 0.5 in the optimizer"),
        ({"lr": True}, "group 0.lr: True in the checkpoint, 0.5 in the optimizer"),
        ({"lr": None}, "group 0.lr: None in the checkpoint, 0.5 in the optimizer"),
        ({"betas": [0.9]}, "group 0.betas: [0.9] in the checkpoint, [0.9, 0.999] in the optimizer"),
        ({"betas": 0.9}, "group 0.betas: 0.9 in the checkpoint"),
        ({"betas": [0.9, "b"]}, "group 0.betas: [0.9, 'b'] in the checkpoint"),
    ],
)
def test_hyperparameters_that_cannot_be_taken_over_are_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    path = save(tmp_path, state_with("AdamW", stepped=True))
    rewrite(path, lambda optimizer: optimizer["groups"][0]["hyperparameters"].update(values))
    assert_refused(path, state_with("AdamW", stepped=False), message)


def test_a_hyperparameter_that_is_missing_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, state_with("AdamW", stepped=True))
    rewrite(path, lambda optimizer: optimizer["groups"][0]["hyperparameters"].pop("eps"))
    assert_refused(path, state_with("AdamW", stepped=False), "group 0.eps: in the optimizer only")


def test_an_optimizer_of_unknown_class_is_refused_but_the_rest_loads(tmp_path: Path) -> None:
    path = rewrite(save(tmp_path, states.fill(states.new_state())), lambda optimizer: optimizer.pop("class"))
    assert_refused(path, states.new_state(), "does not say of which class its optimizer is, needed AdamW")
    state = states.new_state()
    load(path, state, parts=("model", "progress", "rng"))
    assert state.step == 42


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    ("entry", "renamed", "heading"),
    [
        ("exp_avg_sq", None, "missing from the checkpoint (1):\n  optimizer.up.weight.exp_avg_sq"),
        ("exp_avg_sq", "extra", "in the checkpoint only (1):\n  optimizer.up.weight.extra"),
    ],
)
def test_state_that_one_parameter_has_otherwise_than_its_like_is_refused(
    tmp_path: Path, entry: str, renamed: str | None, heading: str, stepped: bool
) -> None:
    path = save(tmp_path, state_with("AdamW", stepped=True))

    def rename(manifest: Any) -> None:
        tensor = manifest["tensors"].pop(f"optimizer.up.weight.{entry}")
        if renamed is not None:
            manifest["tensors"][f"optimizer.up.weight.{renamed}"] = tensor

    folders.rewrite(path, rename)
    assert_refused(path, state_with("AdamW", stepped), heading)


def test_a_parameter_without_any_state_is_accepted(tmp_path: Path) -> None:
    state = state_with("AdamW", stepped=False)
    state.trained.named_parameters()["up.weight"].requires_grad_(False)
    states.step(state)
    save(tmp_path, state)
    fresh = state_with("AdamW", stepped=False)
    load(tmp_path, fresh)
    assert states.tensors_of(fresh).keys() == states.tensors_of(state).keys()


def test_an_optimizer_whose_state_depends_on_the_number_of_dims_returns(tmp_path: Path) -> None:
    def build() -> TrainState:
        state = states.new_state()
        named = state.trained.named_parameters()
        state.optimizer = Adafactor([named[fqn] for fqn in ("up.weight", "up.bias", "down.weight", "norm.weight")])
        return state

    state = build()
    states.step(state)
    save(tmp_path, state)
    fresh = build()
    load(tmp_path, fresh)
    before, after = states.tensors_of(state), states.tensors_of(fresh)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
