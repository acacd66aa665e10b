"""Memory of models of which a part is not trained."""

from dataclasses import replace
from typing import Any

import pytest

from parallel.planner.accounting import Accounting, state_bytes
from parallel.planner.bounds import Degrees, Kind, least_bytes
from parallel.planner.candidate import Candidate
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import model_costs
from parallel.planner.explain import count_states
from parallel.planner.memory import predict_memory
from parallel.planner.search import search
from tests.parallel.planner.requests import everything, request

ASKED = request("llama3.1-8b", 2, 2, 1024)


def candidates() -> list[Candidate]:
    return [plan.candidate for plan in everything(replace(ASKED, reduces=("float32",)))]


def test_gradients_and_moments_count_trained_parameters_alone() -> None:
    every, quarter = model_costs(ASKED.shape), model_costs(ASKED.shape, frozen=0.75)
    for candidate in candidates():
        whole, part = (predict_memory(costs, candidate, 1024, CONSTANTS) for costs in (every, quarter))
        assert part.parameters == whole.parameters
        assert part.optimizer_state == pytest.approx(whole.optimizer_state / 4)
        if part.moment == whole.moment == "step":
            assert part.gradients == pytest.approx(whole.gradients / 4)
        assert part.reserved <= whole.reserved
        assert part.reserved + part.host < whole.reserved + whole.host
        if candidate.config.sharding.cpu_offload:
            assert part.host == pytest.approx(whole.host * (4 + 12 / 4) / 16)
        config = candidate.config
        degrees = Degrees(config.pp, config.dp_replicate, config.dp_shard, config.cp, config.tp)
        kind = Kind(config.data_parallel, config.strategy, config.sharding.cpu_offload)
        assert least_bytes(quarter, ASKED, degrees, kind) <= part.allocated


def test_a_model_too_large_to_train_fits_when_most_of_it_is_frozen() -> None:
    asked = request("llama3.1-8b", 1, 1, 1024)
    assert not search(asked, most=1).plans
    found = search(replace(asked, frozen=0.99), most=1).plans
    assert found[0].memory.optimizer_state == pytest.approx(0.01 * 8 * model_costs(asked.shape).total, rel=1e-3)
    assert count_states(found[0])["stored"] == pytest.approx((4 + 0.01 * 12) * model_costs(asked.shape).total)
    assert any("frozen" in words for words in found[0].unvalidated)


@pytest.mark.parametrize(
    ("accounting", "strategy", "expected"),
    [
        ("classic", "no_shard", 2.0),
        ("classic", "full_shard", 0.5),
        ("stored", "zero1", 4.0),
        ("stored", "shard_grad_op", 3.0),
        ("stored", "full_shard", 1.0),
    ],
)
def test_a_frozen_parameter_is_its_own_bytes(accounting: Accounting, strategy: str, expected: float) -> None:
    assert state_bytes(accounting, strategy, 1, 4, frozen=1.0) == expected
    half = (expected + state_bytes(accounting, strategy, 1, 4)) / 2
    assert state_bytes(accounting, strategy, 1, 4, frozen=0.5) == half


@pytest.mark.parametrize("fields", [{"frozen": 1.0}, {"frozen": -0.1}])
def test_a_share_that_is_none_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be from 0 to less than 1"):
        replace(ASKED, **fields)
