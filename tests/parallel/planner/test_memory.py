"""The closed form of memory against the exact one of the ledger, and against what textbooks count."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.llama import LlamaConfig, llama_plan
from models.moe import MoeConfig
from models.registry import family_of
from parallel import ParallelConfig, Precision
from parallel.ledger.parts import model_parts
from parallel.ledger.states import predict_states
from parallel.planner.accounting import Accounting, state_bytes
from parallel.planner.candidate import Candidate
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import KEEP_INPUT, RECOMPUTES, kept_bytes, model_costs
from parallel.planner.memory import predict_memory
from parallel.planner.pipeline import blocks_of_ranks, stage_loads
from parallel.planner.states import predict_states as planned_states
from parallel.schedules import num_stages
from parallel.stages import cut

MODEL = LlamaConfig(num_layers=4, width=64, num_heads=8, num_kv_heads=4, feed_forward_width=192, vocab_size=256)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"data_parallel": "ddp", "dp_replicate": 4, "dp_shard": 1},
    {"data_parallel": "zero1", "dp_replicate": 4, "dp_shard": 1},
    {"dp_shard": 4},
    {"dp_shard": 4, "strategy": "shard_grad_op"},
    {"dp_replicate": 2, "dp_shard": 2, "strategy": "hybrid_shard"},
    {"dp_replicate": 2, "dp_shard": 2, "strategy": "hybrid_shard_zero2"},
    {"dp_shard": 2, "cp": 2, "cp_method": "ring"},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 1, "tp": 4, "sequence_parallel": False},
    {"dp_shard": 2, "pp": 2, "schedule": "1f1b"},
    {"dp_shard": 2, "pp": 2, "tp": 2, "schedule": "gpipe"},
    {"dp_shard": 4, "data_parallel": "fsdp1"},
)
EXPERTS = replace(MoeConfig.preset("debug"), num_layers=4, vocab_size=256, shared_expert_width=32)


def _held_by_most(config: ParallelConfig, model: LlamaConfig) -> tuple[int, ...]:
    """What the ledger says of the rank of `pp` that holds most: parameters, gradients, optimizer state."""
    with torch.device("meta"):
        whole = family_of(model).build(model)
    held = []
    for rank in range(config.pp):
        parts = model_parts(whole, config, family_of(model).plan(model), rank)
        exact = predict_states(parts, dict.fromkeys(("fsdp", "dp_replicate", "loss", "tp"), 0))
        assert exact.rest.optimizer_state == exact.after_backward.optimizer_state
        held.append((exact.rest.parameters, exact.after_backward.gradients, exact.rest.optimizer_state))
    return max(held)


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, tied_embeddings=True), EXPERTS], ids=["plain", "tied", "moe"])
@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_model_states_are_those_of_the_ledger_to_the_byte(fields: dict[str, Any], model: LlamaConfig) -> None:
    config, costs = ParallelConfig(**fields), model_costs(model.shape)
    loads = stage_loads(costs, config, 4)
    assert max(planned_states(costs, config, load) for load in loads) == _held_by_most(config, model)


def test_uneven_shards_hold_more_by_at_most_a_row_of_each_parameter() -> None:
    model = replace(MODEL, width=72, num_heads=9, num_kv_heads=3, feed_forward_width=200, vocab_size=253)
    config, costs = ParallelConfig(dp_shard=5), model_costs(model.shape)
    planned = planned_states(costs, config, stage_loads(costs, config, 1)[0])
    exact = _held_by_most(config, model)
    rows = 4 * model.num_layers * (5 * 72 + 200) + 4 * 2 * 72
    assert all(0 <= most - each <= times * rows for most, each, times in zip(exact, planned, (1, 1, 2), strict=True))
    assert exact != planned


def test_what_a_block_keeps_is_the_textbooks_sum_of_widths() -> None:
    costs = model_costs(LlamaConfig.preset("llama3.1-8b").shape)
    d, k, f, h = costs.width, costs.kv_width, costs.wide, costs.num_heads
    kept = {each.name: kept_bytes(costs, each, 2, 1, False) for each in RECOMPUTES}
    assert kept["none"] == 12 * d + 4 * k + 6 * f + 4 * h
    assert kept["selective every_second_matmul"] == 6 * d + 2 * k + 2 * f + 4 * h
    assert kept["full"] == 2 * d
    assert list(kept.values()) == sorted(kept.values(), reverse=True)


@pytest.mark.parametrize(
    ("accounting", "strategy", "ranks", "expected"),
    [
        ("classic", "no_shard", 8, 16),
        ("classic", "zero1", 8, 4 + 12 / 8),
        ("classic", "shard_grad_op", 8, 2 + 14 / 8),
        ("classic", "full_shard", 8, 2),
        ("stored", "full_shard", 8, 2),
        ("stored", "zero1", 8, 8 + 1),
    ],
)
def test_both_accountings_give_their_bytes_a_parameter(
    accounting: Accounting, strategy: str, ranks: int, expected: float
) -> None:
    assert state_bytes(accounting, strategy, 1, ranks) == expected


def test_175b_and_70b_on_the_gpus_that_tutorials_name_hold_more_states_than_those_have() -> None:
    assert state_bytes("classic", "full_shard", 70e9, 8) == 140e9
    assert state_bytes("classic", "full_shard", 175e9, 32) == 87.5e9


def test_gradients_summed_once_a_step_stay_whole() -> None:
    config = ParallelConfig(dp_shard=8, precision=Precision(compute="bfloat16", reduce="float32"))
    model = LlamaConfig.preset("llama3.1-8b")
    costs = model_costs(model.shape)
    last = predict_memory(costs, Candidate(config, KEEP_INPUT, "last", 1, 2), 1024, CONSTANTS)
    assert last.gradients == 4 * costs.total


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["llama3.1-8b", "llama3.1-70b", "llama3.2-1b"])
def test_the_ends_of_a_pipeline_have_the_blocks_that_are_reckoned_with(pp: int, schedule: Any, name: str) -> None:
    model = LlamaConfig.preset(name)
    config = ParallelConfig(dp_shard=1, pp=pp, schedule=schedule)
    if num_stages(config) > model.num_layers:
        return
    blocks = [0] * pp
    for stage in cut(llama_plan(model), config):
        blocks[stage.rank] += sum(name.startswith("blocks.") for name in stage.modules)
    first, middle, last = blocks_of_ranks(model_costs(model.shape), config)
    assert (first, max(blocks[1:]), last) == (blocks[0], middle, blocks[-1])
