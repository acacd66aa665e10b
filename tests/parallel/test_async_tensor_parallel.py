"""Overlapped tensor parallelism is refused where it cannot run, and torch still knows what it is asked for by."""

from typing import Any

import pytest
import torch

from parallel import ParallelConfig, build_mesh
from parallel.async_tensor_parallel import OPTIONS, check_async_tensor_parallel
from tests.parallel.small_model import build
from tests.ranks import run_ranks

FIELDS: dict[str, Any] = {"tp": 2, "compile": True, "async_tp": True}


def test_a_cpu_refuses_it_with_the_reason_before_anything_is_changed() -> None:
    for said in run_ranks(2, refused_on_a_cpu):
        assert (
            said
            == "async_tp=True needs GPUs that read each other's memory, but this mesh is on cpu; use async_tp=False"
        )


def refused_on_a_cpu() -> str:
    with pytest.raises(ValueError) as refusal:
        build(ParallelConfig(**FIELDS))
    return str(refusal.value)


def test_ranks_on_several_nodes_refuse_it() -> None:
    for said in run_ranks(2, refused_on_two_nodes):
        assert "those of tp=2 lie on several nodes; use a tp of at most 1" in said


def refused_on_two_nodes() -> str:
    mesh = build_mesh(ParallelConfig(tp=2))
    mesh.device, mesh.ranks_per_node = torch.device("cuda"), 1
    with pytest.raises(ValueError) as refusal:
        check_async_tensor_parallel(ParallelConfig(**FIELDS), mesh)
    return str(refusal.value)


@pytest.mark.parametrize("missing", [{"tp": 1}, {"compile": False}, {"sequence_parallel": False}])
def test_it_needs_compiled_blocks_and_what_sequence_parallel_sends(missing: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="async_tp=True overlaps what sequence_parallel sends over tp > 1"):
        ParallelConfig(**FIELDS | missing)


def test_torch_still_has_the_private_names_that_switch_it_on() -> None:
    from torch.distributed import _symmetric_memory

    # Refuses options that it does not know.
    torch.compile(torch.relu, backend="inductor", options=OPTIONS)
    assert callable(_symmetric_memory.enable_symm_mem_for_group)
    assert callable(_symmetric_memory.is_symm_mem_enabled_for_group)
