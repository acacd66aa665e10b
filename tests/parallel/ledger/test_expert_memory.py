"""What a step of a model with experts holds at most is predicted: at an even load, at a given one, and at the worst."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ParallelConfig
from parallel.ledger.exactness import promised_share
from parallel.ledger.memory import MemoryForecast
from recipes.find import find_recipe
from recipes.ledger import routing
from recipes.ledger.fake import fake_step
from recipes.ledger.forecast import Forecast, coordinates_of, forecast
from recipes.ledger.measure import measure
from recipes.ledger.rows import lines
from recipes.ledger.traced import TracedStep
from recipes.recipe import Recipe
from tests.parallel.ledger.test_memory import BF16, FULL, SELECTIVE, assert_holds
from tests.ranks import run_ranks

EP = {"ep": 2}
SHARED = {"shared_expert_width": 64, "router_score": "sigmoid", "capacity_factor": 1.25}
SPLIT = {"pp": 2, "schedule": "zbv_zero_bubble"}


def recipe(layout: dict[str, Any], model: dict[str, Any]) -> Recipe:
    """Two layers of eight experts, of which a token meets two."""
    base = find_recipe("moe_debug")
    return dataclasses.replace(
        base,
        parallel=ParallelConfig(**layout),
        model=dataclasses.replace(base.model, **{"num_layers": 2, **model}),
        training=dataclasses.replace(base.training, micro_batch=2, global_batch=4),
        data=dataclasses.replace(base.data, sequence_length=256, attend_across_documents=True),
    )


# Ranks, the rank to be, micro-batches, layout, model, how far off the peak may be.
CASES: dict[str, tuple[int, int, int, dict[str, Any], dict[str, Any], float]] = {
    "full_shard": (2, 0, 1, {}, {}, 0.03),
    "ddp in bf16": (2, 0, 1, {"data_parallel": "ddp", "precision": BF16}, {}, 0.03),
    "selectively recomputed, a dense layer": (2, 0, 1, SELECTIVE, {"dense_layers": (0,)}, 0.03),
    "tp, shared expert and capacity": (2, 1, 1, {"tp": 2}, SHARED, 0.03),
    "cp by a ring": (2, 1, 1, {"cp": 2, "cp_method": "ring"}, {}, 0.03),
    "cp by ulysses": (2, 1, 1, {"cp": 2, "cp_method": "ulysses"}, {}, 0.05),
    "ep, two micro-batches": (2, 1, 2, EP, {}, 0.15),
    "ep x tp in bf16, recomputed": (4, 1, 1, FULL | EP | {"tp": 2, "precision": BF16}, {}, 0.15),
    "backward split, recomputed": (2, 1, 2, FULL | SPLIT, {"num_layers": 4}, 0.25),
}
FAST = ("full_shard", "selectively recomputed, a dense layer", "ep x tp in bf16, recomputed")


def of_rank(case: str) -> tuple[Forecast, TracedStep]:
    """One rank's step on tensors without values, in a process of the pool."""
    world_size, rank, num_micro_batches, layout, model, _ = CASES[case]
    asked = recipe(layout, model)
    dist.destroy_process_group()
    traced, mesh = fake_step(asked, world_size, rank, num_micro_batches, look=coordinates_of)
    return forecast(asked, world_size, mesh, num_micro_batches), traced


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[] if each in FAST else [pytest.mark.slow]) for each in CASES]
)
def test_peaks_at_an_even_load_are_within_what_is_listed(case: str) -> None:
    ((predicted, traced),) = run_ranks(1, of_rank, case)
    assert promised_share(predicted.bounds) == CASES[case][-1]
    assert_holds(lines(predicted, traced), CASES[case][-1])


def to_the_first(like: Tensor, num_experts: int) -> Tensor:
    """All tokens to the first experts."""
    return torch.arange(like.shape[-1]).expand(like.shape).clone()


def uneven(asked: Recipe) -> list[tuple[int, MemoryForecast | None, float]]:
    """Of each rank: the traced peak, what was predicted for the rows that came, and the bound of any load."""
    with mock.patch.object(routing, "_in_turn", to_the_first):
        ledgers = measure(asked)
    tokens = asked.training.micro_batch * asked.data.sequence_length
    found = []
    for ledger in ledgers:
        # Both experts of every token lie on the first rank.
        rows = 0 if ledger.rank else 2 * 2 * tokens
        coordinates = dict.fromkeys(("pp", "loss", "cp", "tp"), 0) | {"fsdp": ledger.rank}
        given = forecast(asked, 2, coordinates, 1, expert_rows=rows)
        (bound,) = (each.share for each in given.bounds if not each.in_trace)
        assert bound is not None
        found.append((ledger.traced.peak_bytes, given.memory, bound))
        even = ledger.predicted.memory
        assert even is not None and abs(even.peak - ledger.traced.peak_bytes) <= bound * ledger.traced.peak_bytes
    return found


def test_a_given_load_is_predicted_and_the_worst_is_within_its_bound() -> None:
    for peak_bytes, memory, bound in run_ranks(2, uneven, recipe(EP, {}))[0]:
        assert memory is not None
        assert memory.peak == pytest.approx(peak_bytes, rel=0.03)
        assert 0.2 < bound < 1
