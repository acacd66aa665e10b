"""What blocks allow that are one sequence of ops, asked about a layout alone."""

from dataclasses import replace
from typing import Any

import pytest

from parallel import ParallelConfig
from parallel.block_rules import breaks_graph, check_ops, sees_whole_blocks

PICKS = ParallelConfig(dp_shard=2, compile=True, activation_checkpointing="selective")


def test_a_policy_cannot_choose_among_the_ops_of_compiled_blocks_with_experts() -> None:
    with pytest.raises(ValueError, match=r"blocks with experts leave .*use activation_checkpointing='full'"):
        check_ops(PICKS, has_experts=True)
    check_ops(PICKS, has_experts=False)
    for other in (replace(PICKS, compile=False), replace(PICKS, activation_checkpointing="full")):
        check_ops(other, has_experts=True)


@pytest.mark.parametrize(("compiles", "has_experts"), [(True, True), (True, False), (False, True)])
def test_experts_break_the_graph_of_what_is_compiled(compiles: bool, has_experts: bool) -> None:
    config = ParallelConfig(dp_shard=2, compile=compiles)
    assert breaks_graph(config, has_experts=has_experts) == (compiles and has_experts)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"compile": True}, True),
        ({"activation_checkpointing": "selective"}, True),
        ({"activation_checkpointing": "full"}, False),
        ({"compile": True, "data_parallel": "ddp", "dp_replicate": 2, "dp_shard": 1}, False),
    ],
)
def test_units_stay_out_of_blocks_whose_ops_are_seen_at_once(fields: dict[str, Any], expected: bool) -> None:
    config = replace(ParallelConfig(dp_shard=2), **fields)
    assert sees_whole_blocks(config, config.activation_checkpointing) == expected
