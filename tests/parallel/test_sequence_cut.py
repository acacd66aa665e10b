"""A sequence is cut into parts of one length that make it up again."""

import pytest
import torch

from parallel.ring_attention import steps_of
from parallel.sequence_cut import SequenceCut


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_the_parts_of_all_ranks_join_to_the_whole(degree: int, balanced: bool) -> None:
    whole = torch.arange(2 * 24 * 3).view(2, 24, 3)
    parts = [SequenceCut(degree=degree, rank=rank, balanced=balanced).part(whole) for rank in range(degree)]
    assert all(part.shape == (2, 24 // degree, 3) for part in parts)
    assert SequenceCut(degree=degree, balanced=balanced).join(parts).equal(whole)


def test_a_balanced_rank_holds_pieces_from_both_ends() -> None:
    places = torch.arange(8)[None]
    held = [SequenceCut(degree=2, rank=rank, balanced=True).part(places)[0].tolist() for rank in range(2)]
    assert held == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_the_steps_of_a_ring_hold_each_pair_that_causal_attention_has_and_are_even(degree: int) -> None:
    num_tokens, places = 4 * degree * 2, torch.arange(4 * degree * 2)[None]
    for rank in range(degree):
        cut = SequenceCut(degree=degree, rank=rank, balanced=True)
        seen, scores = torch.zeros(num_tokens, num_tokens, dtype=torch.int64), []
        for step in steps_of(cut, num_tokens // degree):
            queries, keys = cut.part(places)[0, step.queries], cut.part(places, step.source)[0, step.keys]
            allowed = torch.ones(len(queries), len(keys), dtype=torch.int64)
            seen[queries[:, None], keys[None, :]] += allowed.tril() if step.causal else allowed
            scores.append(allowed.numel())
        own = cut.part(places)[0]
        expected = torch.ones_like(seen).tril()
        expected[[place for place in range(num_tokens) if place not in own]] = 0
        assert seen.equal(expected)
        assert set(scores[1:]) == {scores[0] // 2}
