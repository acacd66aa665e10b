"""What a rank of a pipeline holds at most is predicted under every schedule that runs several stages a rank."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from models.layers.lora import LoraConfig
from parallel import ParallelConfig
from parallel.ledger.exactness import promised_share
from parallel.ledger.schedule_order import Action, actions_of
from recipes.ledger.rows import lines
from tests.parallel.ledger.test_memory import ALL_MAPS, BF16, FULL, HEADS, TIED, assert_holds, of_layout, real, recipe
from tests.ranks import run_ranks

INTERLEAVED = {"pp": 2, "schedule": "interleaved_1f1b"}
ZERO_BUBBLE = {"pp": 2, "schedule": "interleaved_zero_bubble"}
ZBV = {"pp": 2, "schedule": "zbv_zero_bubble"}
DUAL = {"pp": 2, "schedule": "dual_pipe_v"}
FOUR = {"num_layers": 4}

# Ranks, the rank to be, micro-batches, layout, model, whether there are documents.
CASES: dict[str, tuple[int, int, int, dict[str, Any], dict[str, Any], bool]] = {
    "interleaved, recomputed": (2, 0, 2, INTERLEAVED | FULL, FOUR, True),
    "more stages than stay gathered": (4, 0, 2, INTERLEAVED | {"stages": (1,) * 8}, {"num_layers": 8}, False),
    "interleaved without bubbles, in bf16": (4, 1, 2, ZERO_BUBBLE | {"precision": BF16}, FOUR | HEADS, False),
    "v without bubbles, first and last stage": (2, 0, 3, ZBV, FOUR | TIED, False),
    "v without bubbles, recomputed": (2, 1, 2, ZBV | FULL, FOUR, False),
    "v without bubbles x tp in bf16": (4, 3, 2, ZBV | {"tp": 2, "precision": BF16}, FOUR, False),
    "v in both directions": (2, 1, 4, DUAL, FOUR, False),
}
SLOW = (
    "more stages than stay gathered",
    "interleaved without bubbles, in bf16",
    "v without bubbles, recomputed",
    "v without bubbles x tp in bf16",
    "v in both directions",
)


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else []) for each in CASES]
)
def test_states_and_traffic_are_exact_and_peaks_within_three_percent(case: str) -> None:
    ((predicted, traced),) = run_ranks(1, of_layout, CASES[case])
    assert promised_share(predicted.bounds) == 0.03
    assert_holds(lines(predicted, traced), 0.03)


# Cases of the table above with adapters, all else frozen: weights of some maps alone keep a graph between both parts of
# backward.
ADAPTERS: dict[str, LoraConfig] = {
    "interleaved without bubbles, in bf16": LoraConfig(rank=8, targets=("blocks.*.attention.k_proj",)),
    "v without bubbles, first and last stage": ALL_MAPS,
    "v without bubbles, recomputed": LoraConfig(rank=8),
    "v without bubbles x tp in bf16": LoraConfig(rank=8),
    "v in both directions": LoraConfig(rank=8, targets=("blocks.*.attention.o_proj",)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else []) for each in ADAPTERS]
)
def test_the_same_holds_where_adapters_alone_are_trained(case: str) -> None:
    ((predicted, traced),) = run_ranks(1, of_layout, CASES[case], ADAPTERS[case])
    assert promised_share(predicted.bounds) == 0.03
    assert_holds(lines(predicted, traced), 0.03)


@pytest.mark.slow
def test_the_same_holds_for_a_real_step() -> None:
    asked = recipe(ZBV, FOUR)
    ledgers = run_ranks(
        2, real, dataclasses.replace(asked, training=dataclasses.replace(asked.training, global_batch=6))
    )
    for each in ledgers[0]:
        assert_holds(lines(each.predicted, each.traced), 0.03)


def test_actions_of_a_schedule_in_a_file_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,0I0,0W0,0B1\n,1F0,1B0,1F1,1B1,\n", encoding="ascii")
    config = ParallelConfig(pp=2, schedule="csv", schedule_file=str(path))
    own = [each for each in actions_of(config, 0, 2) if each.kind not in ("gather", "free", "reduce")]
    assert own == [
        Action("forward", 0, 0),
        Action("forward", 0, 1),
        Action("inputs", 0, 0),
        Action("weights", 0, 0),
        Action("backward", 0, 1),
    ]
