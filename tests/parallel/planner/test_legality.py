"""The planner takes the layouts that `parallelize` takes."""

from dataclasses import replace
from typing import Any

import pytest

from models.llama import LlamaConfig
from models.moe import MoeConfig
from parallel import ParallelConfig, Precision, Sharding
from parallel.planner.legality import is_legal_layout

DENSE, SPARSE = LlamaConfig.preset("debug").shape, MoeConfig.preset("debug").shape
SELECTIVE: dict[str, Any] = {"compile": True, "activation_checkpointing": "selective"}


def takes(shape: Any, **fields: Any) -> bool:
    return is_legal_layout(ParallelConfig(**({"dp_shard": 2} | fields)), shape, 64)


def test_compiled_blocks_with_experts_leave_a_policy_nothing_to_choose() -> None:
    assert takes(DENSE, **SELECTIVE)
    assert not takes(SPARSE, **SELECTIVE)
    assert takes(SPARSE, compile=True)
    assert takes(SPARSE, activation_checkpointing="selective")


def test_compiled_blocks_are_not_cut_into_units_by_size() -> None:
    by_size = Sharding(units="size")
    assert takes(DENSE, sharding=by_size)
    assert not takes(DENSE, sharding=by_size, compile=True)
    assert not takes(DENSE, sharding=by_size, activation_checkpointing="selective")


def test_float8_wants_whole_matrices() -> None:
    float8 = Precision(compute="bfloat16", float8=True)
    assert takes(DENSE, precision=float8)
    assert not takes(DENSE, precision=float8, tp=2)


@pytest.mark.parametrize(("backend", "tied", "expected"), [("fsdp1", True, False), ("fsdp1", False, True)])
def test_a_backend_hears_of_tied_embeddings(backend: str, tied: bool, expected: bool) -> None:
    shape = replace(DENSE, tied_embeddings=tied)
    assert takes(shape, data_parallel=backend, tp=2, sequence_parallel=False) == expected
