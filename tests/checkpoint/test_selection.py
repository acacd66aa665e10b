"""A load fills what is asked for, under the names that are given, and tells what it left."""

from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint import TrainState, load, save
from tests.checkpoint import folders, states
from tests.checkpoint.states import Counter, Toy
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("run"), states.fill(states.new_state()))


def fresh(seed: int = 5) -> TrainState:
    return states.fill(states.new_state(), seed)


def wrong(state: TrainState) -> set[str]:
    """Names of tensors that do not have the values of the checkpoint."""
    return set(states.wrong_tensors(state))


def test_only_keys_that_match_a_pattern_are_loaded(path: Path) -> None:
    state = fresh()
    load(path, state, parts=("model",), keys=["model.up.*", "model.norm.weight"])
    chosen = {"model.up.weight", "model.up.bias", "model.norm.weight"}
    assert wrong(state) == states.tensors_of(state).keys() - chosen
    load(path, state, parts=("optimizer",), keys=["optimizer.up.weight.*"])
    chosen |= {f"optimizer.up.weight.{entry}" for entry in ("step", "exp_avg", "exp_avg_sq")}
    assert wrong(state) == states.tensors_of(state).keys() - chosen


def load_some(path: Path) -> set[str]:
    state = states.fill(states.new_state("fsdp 2"), 5)
    load(path, state, parts=("model",), keys=["model.up.*"])
    return states.tensors_of(state).keys() - wrong(state)


def test_ranks_load_some_keys_together(path: Path) -> None:
    assert run_ranks(2, load_some, path) == [{"model.up.weight", "model.up.bias"}] * 2


def test_a_key_map_says_what_an_entry_is_called_in_the_checkpoint(path: Path) -> None:
    state = fresh()
    load(path, state, parts=("model",), keys={"model.head.weight": "model.embed.weight", "model.scale": "model.scale"})
    named = state.trained.named_parameters()
    assert torch.equal(named["head.weight"], states.value_of("model.embed.weight", named["head.weight"], seed=0))
    assert "model.scale" not in wrong(state)
    assert "model.embed.weight" in wrong(state)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model.nothing.*"], r"keys \['model\.nothing\.\*'\] match no entry"),
        ({"model.nothing": "model.scale"}, r"in the checkpoint only \(1\):\n  model\.nothing"),
        ({"model.nothing": "model.none"}, r"keys \['model\.nothing'\] match no entry"),
        ({"model.scale": "model.none"}, r"missing from the checkpoint \(1\):\n  model\.scale"),
        ({"model.scale": "model.pair"}, r"of another shape \(1\):\n  model\.scale: \[2, 4\], needed \[1\]"),
        ("model.*", r"keys='model\.\*' must be a list of patterns"),
    ],
)
def test_keys_that_name_nothing_are_refused(path: Path, keys: object, message: str) -> None:
    state = fresh()
    with pytest.raises(ValueError, match=message):
        load(path, state, parts=("model",), keys=keys)  # type: ignore[arg-type]  # what a user may write
    assert states.wrong_tensors(state, 5) == []


def another_model() -> TrainState:
    """A state that lacks a parameter, has another, has one of another shape and one of another dtype."""
    model = Toy(vocab_size=11)
    model.norm = nn.LayerNorm(6)  # type: ignore[assignment]  # the point of the test
    model.down = nn.Linear(10, 5, bias=False)
    model.up = nn.Linear(6, 10, dtype=torch.float64)
    del model.pair
    state = states.fill(states.new_state(model=model), 5)
    state.stateful = {"data": Counter(), "more": Counter(3)}
    return state


def test_a_load_that_is_not_strict_returns_the_list_and_leaves_what_does_not_fit(path: Path) -> None:
    state = another_model()
    with pytest.raises(ValueError) as raised:
        load(path, state, parts=("model", "progress"))
    differences = load(path, state, parts=("model", "progress"), strict=False).differences
    assert differences.describe() in str(raised.value)
    assert differences.missing == ["model.norm.bias", "stateful.more"]
    assert differences.unexpected == ["model.pair"]
    assert differences.shapes == ["model.down.weight: [6, 10], needed [5, 10]"]
    assert len(differences.dtypes) == 2
    left = {"model.norm.bias", "model.down.weight", "model.up.weight", "model.up.bias"}
    assert {name for name in wrong(state) if name.startswith("model.")} == left
    assert state.step == 42
    assert [each.state_dict()["position"] for each in state.stateful.values()] == [7, 3]


def test_an_optimizer_is_loaded_whole_or_not_at_all(path: Path) -> None:
    state = another_model()
    with pytest.raises(ValueError, match=r"(?s)nothing was changed.*optimizer\.down\.weight\.exp_avg: \[6, 10\]"):
        load(path, state, strict=False)
    assert state.step == 47


def test_a_load_of_what_fits_has_no_differences(path: Path) -> None:
    loaded = load(path, fresh(), strict=False)
    assert loaded.differences.describe() == ""
    assert loaded.manifest.header.step == 42


def test_dtypes_are_cast_only_when_asked(path: Path) -> None:
    def half() -> TrainState:
        state = states.new_state(model=Toy().to(torch.bfloat16))
        state.optimizer = None
        return state

    with pytest.raises(ValueError, match=r"model\.embed\.weight: torch\.float32, needed torch\.bfloat16"):
        load(path, half(), parts=("model",))
    state = half()
    load(path, state, parts=("model",), cast=True)
    for fqn, parameter in state.trained.named_parameters().items():
        stored = torch.bfloat16 if fqn == "low.weight" else torch.float32
        whole = states.value_of(f"model.{fqn}", parameter.to(stored), seed=0)
        assert torch.equal(parameter, whole.to(torch.bfloat16)), fqn


def test_integers_are_never_cast(path: Path, tmp_path: Path) -> None:
    copied = folders.copy(path, tmp_path / path.name)
    folders.rewrite(copied, lambda manifest: manifest["tensors"]["model.scale"].update(dtype="int32"))
    with pytest.raises(ValueError, match=r"model\.scale: torch\.int32, needed torch\.float32"):
        load(copied, fresh(), cast=True)
