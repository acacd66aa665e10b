"""The guide by which people choose a layout, and where the planner says otherwise."""

from dataclasses import replace

import pytest

from parallel.planner.guide import CLOSE, layer_figures, rules, walk
from parallel.planner.search import search
from tests.parallel.planner.requests import request

LARGE = {"model": "llama3.1-405b", "gpus": 512, "batch": 512, "length": 8192}


@pytest.mark.parametrize(
    ("fields", "choice", "num_questions"),
    [
        ({"model": "llama3.2-1b", "batch": 32, "length": 2048}, "ddp", 1),
        ({"model": "llama3.1-8b"}, "shard_grad_op", 2),
        ({"model": "llama3.1-70b", "gpus": 32, "batch": 64, "length": 2048, "gpu": "b200-180gb"}, "hybrid_shard", 3),
        ({"model": "llama3.1-70b", "gpus": 256, "batch": 512, "length": 8192}, "full_shard", 4),
        (LARGE, "full_shard with tp", 5),
    ],
)
def test_each_branch_of_the_guide_is_taken_where_its_layout_is_the_first_that_fits(
    fields: dict[str, object], choice: str, num_questions: int
) -> None:
    asked = request(**fields)  # type: ignore[arg-type]
    if choice == "hybrid_shard":
        # A node of 8 x 180 GB holds 1,129 GB of states, and little beside them.
        asked = replace(asked, headroom=0.0)
    guide = walk(asked)
    assert guide.choice == choice
    assert len(guide.answers) == num_questions
    assert [each.is_yes for each in guide.answers] == [False] * (num_questions - 1) + [True]
    short = [each for each in guide.answers[:-1] if each.least_bytes is not None]
    assert all(each.least_bytes > each.usable_bytes for each in short)  # type: ignore[operator]


def test_where_the_planner_differs_it_says_by_how_much_and_why() -> None:
    guide = walk(request("llama3.2-1b", 8, 32, 2048))
    assert guide.chosen is not None and guide.best is not None
    assert guide.best.ranked_s < guide.chosen.ranked_s * (1 - CLOSE)
    assert guide.verdict.startswith("the planner disagrees: fsdp2 shard_grad_op dp_shard 8")
    assert "ddp takes" in guide.verdict
    assert "small operations" in guide.verdict


def test_where_both_are_as_good_the_planner_agrees() -> None:
    guide = walk(request("llama3.1-70b", 256, 512, 8192))
    assert guide.verdict == "the planner agrees with full_shard"


def test_where_no_branch_fits_the_guide_has_no_answer_and_the_planner_may_have_one() -> None:
    asked = request("llama3.1-70b", 16, 64, 8192)
    guide = walk(asked)
    assert guide.choice is None
    assert not any(each.is_yes for each in guide.answers)
    assert guide.verdict.endswith("states in host memory")
    assert guide.best == search(asked, most=1).plans[0]


def test_one_machine_is_not_asked_whether_several_are_needed() -> None:
    assert "hybrid_shard" not in [rule.choice for rule in rules(request(gpus=8))]
    assert "hybrid_shard" in [rule.choice for rule in rules(request(gpus=16))]


def test_the_numbers_of_the_guide_are_those_of_the_model() -> None:
    words = "; ".join(layer_figures(request("llama3.1-70b", 256, 512)))
    assert "70.55 B parameters, 1128.9 GB of states" in words
    assert "856 M parameters, 1.71 GB when it is gathered" in words
