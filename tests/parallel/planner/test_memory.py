"""The closed form of memory against the exact one of the ledger, and against what textbooks count."""

from typing import Any

import pytest
import torch

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import ParallelConfig, Precision
from parallel.ledger.parts import model_parts
from parallel.ledger.states import predict_states
from parallel.planner.accounting import Accounting, state_bytes
from parallel.planner.candidate import Candidate
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import KEEP_INPUT, RECOMPUTES, kept_bytes, model_costs
from parallel.planner.memory import Memory, predict_memory
from parallel.planner.pipeline import most_blocks
from parallel.stages import cut

MODEL = LlamaConfig(num_layers=4, width=64, num_heads=8, num_kv_heads=4, feed_forward_width=192, vocab_size=256)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"data_parallel": "ddp", "dp_replicate": 4, "dp_shard": 1},
    {"data_parallel": "zero1", "dp_replicate": 4, "dp_shard": 1},
    {"dp_shard": 4},
    {"dp_shard": 4, "strategy": "shard_grad_op"},
    {"dp_replicate": 2, "dp_shard": 2, "strategy": "hybrid_shard"},
    {"dp_shard": 2, "tp": 2},
)


def _memory(config: ParallelConfig, model: LlamaConfig = MODEL, micro_batch: int = 1, length: int = 64) -> Memory:
    candidate = Candidate(config, KEEP_INPUT, "every_micro_batch", micro_batch, 1)
    return predict_memory(model_costs(model.shape), candidate, length, CONSTANTS)


@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_model_states_are_those_of_the_ledger_but_for_padding(fields: dict[str, Any]) -> None:
    config = ParallelConfig(**fields)
    with torch.device("meta"):
        parts = model_parts(Llama(MODEL), config, llama_plan(MODEL))
    exact = predict_states(parts, dict.fromkeys(("fsdp", "dp_replicate", "loss", "tp"), 0))
    predicted = _memory(config)
    assert predicted.parameters == pytest.approx(exact.rest.parameters, rel=0.01)
    assert predicted.optimizer_state == pytest.approx(exact.rest.optimizer_state, rel=0.01)


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
    assert last.gradients == 4 * costs.total - 4 * costs.width


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_no_rank_of_a_pipeline_has_a_block_more_than_is_reckoned_with(pp: int, schedule: Any) -> None:
    model = LlamaConfig.preset("llama3.1-70b")
    config = ParallelConfig(dp_shard=1, pp=pp, schedule=schedule)
    blocks = [0] * pp
    for stage in cut(llama_plan(model), config):
        blocks[stage.rank] += sum(name.startswith("blocks.") for name in stage.modules)
    assert 0 <= max(most_blocks(model_costs(model.shape), config)) - max(blocks) <= 1
