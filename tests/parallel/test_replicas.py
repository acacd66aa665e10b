"""Ranks that should hold the same values are compared, and every rank says which parameters differ."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.llama import LlamaConfig
from parallel import ParallelConfig, replicas
from parallel.replicas import differ_between_ranks, hash_bits, local_part, verify_replicas
from tests.parallel.small_model import build
from tests.ranks import run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8]


def sample(dtype: torch.dtype) -> Tensor:
    return (torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tensors_hash_equal_and_a_change_of_any_bit_shows(dtype: torch.dtype) -> None:
    tensor = sample(dtype)
    before = hash_bits(tensor)
    assert hash_bits(tensor.t().contiguous().t()) == before
    raw = tensor.view(-1).view(torch.uint8)
    for byte in range(0, len(raw), 3):
        for bit in (1, 128):
            raw[byte] ^= bit
            assert hash_bits(tensor) != before, (byte, bit)
            raw[byte] ^= bit
    assert hash_bits(tensor) == before


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_changes_that_might_cancel_show_too(dtype: torch.dtype) -> None:
    tensor = sample(dtype)
    before = hash_bits(tensor)
    signs, swapped = tensor.clone(), tensor.clone()
    signs[0, :2] *= -1
    swapped[0, :2] = tensor[0, :2].flip(0)
    assert hash_bits(signs) != before
    assert hash_bits(swapped) != before
    assert hash_bits(torch.zeros(3, dtype=dtype)) != hash_bits(-torch.zeros(3, dtype=dtype))


def test_the_hash_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hash_bits(sample(torch.float32))
    monkeypatch.setattr(replicas, "CHUNK_ELEMENTS", 4)
    assert hash_bits(sample(torch.float32)) == whole
    assert hash_bits(torch.empty(0)) == 0


def test_elements_that_differ_between_ranks_are_found_on_every_rank() -> None:
    for found in run_ranks(3, differing_elements):
        assert found == [False, True, True, False, True]


def differing_elements() -> list[bool]:
    rank = torch.distributed.get_rank()
    lowest = torch.iinfo(torch.int64).min
    values = torch.tensor([7, rank, -rank, lowest, lowest if rank == 1 else -lowest - 1])
    return differ_between_ranks(values).tolist()


# A layout, a parameter that one rank changes, and along what view that shows.
PERTURBED: list[tuple[dict[str, Any], str, str]] = [
    ({"strategy": "hybrid_shard", "dp_replicate": 2}, "blocks.0.attention.q_proj.weight", "dp_replicate"),
    ({"strategy": "hybrid_shard", "dp_replicate": 2}, "norm.weight", "dp_replicate"),
    ({"tp": 2}, "blocks.0.attention_norm.weight", "tp"),
    ({"tp": 2, "sequence_parallel": False}, "blocks.0.feed_forward_norm.weight", "tp"),
    ({"tp": 4, "sequence_parallel": False}, "norm.weight", "tp"),
    ({"tp": 4}, "norm.weight", "tp"),
    ({"tp": 2, "strategy": "hybrid_shard", "dp_replicate": 2}, "head.weight", "dp_replicate"),
]
# What is sharded everywhere may differ between ranks.
UNSEEN: list[tuple[dict[str, Any], str]] = [
    ({}, "norm.weight"),
    ({"tp": 2}, "embed.weight"),
    ({"tp": 4}, "head.weight"),
]


def test_replicas_that_differ_on_one_rank_are_named_on_every_rank() -> None:
    results = run_ranks(4, refusals)
    for index, (fields, fqn, view) in enumerate(PERTURBED):
        for rank, (messages, _) in enumerate(results):
            assert f"replicas of parameters differ (along {view}: {fqn})" in messages[index], (fields, rank)
    assert all(accepted == [""] * len(UNSEEN) for _, accepted in results)


def refusals() -> tuple[list[str], list[str]]:
    """What is said when rank 3 changes an element of a parameter, which it holds a part of."""
    seen = [_verify_perturbed(fields, fqn) for fields, fqn, _ in PERTURBED]
    return seen, [_verify_perturbed(fields, fqn) for fields, fqn in UNSEEN]


def _verify_perturbed(fields: dict[str, Any], fqn: str) -> str:
    trained = build(ParallelConfig(**fields), LlamaConfig(num_layers=1))
    verify_replicas(trained.named_parameters(), trained.mesh)
    if torch.distributed.get_rank() == 3:
        local_part(trained.named_parameters()[fqn]).view(-1)[0] += 1e-14
    try:
        verify_replicas(trained.named_parameters(), trained.mesh)
    except ValueError as error:
        return str(error)
    return ""
