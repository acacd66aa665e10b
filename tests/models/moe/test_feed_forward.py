"""Tests of routers and of what a layer says of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.moe import MoeConfig
from models.moe.feed_forward import MoeFeedForward, Router

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _config(**fields: Any) -> MoeConfig:
    return MoeConfig(**{"width": 8, "num_heads": 2, "num_kv_heads": 1, "num_experts": 6, "expert_width": 4, **fields})


def _router(**fields: Any) -> Router:
    router = Router(_config(**fields)).double()
    router.weight.data = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return router


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_the_best_scores(score: str, normalize: bool) -> None:
    router = _router(router_score=score, normalize_top_k=normalize, num_experts_per_token=3)
    weights, experts, shares = router(X)
    logits = X @ router.weight.T
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    best, places = scores.sort(descending=True)
    expected = best[..., :3] / best[..., :3].sum(-1, keepdim=True) if normalize else best[..., :3]
    assert torch.equal(experts, places[..., :3])
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(shares, scores / scores.sum(-1, keepdim=True))


def test_a_selection_bias_changes_who_is_picked_but_not_the_weights() -> None:
    router = _router(balance_rate=0.1, router_score="sigmoid", normalize_top_k=False)
    assert router.selection_bias is not None and not router.selection_bias.requires_grad
    router.selection_bias[4] = 10
    weights, experts, _ = router(X)
    assert (experts == 4).any(-1).all()
    scores = (X @ router.weight.T).sigmoid()
    torch.testing.assert_close(weights, scores.gather(-1, experts))


def test_scores_are_computed_in_float32_in_narrower_models() -> None:
    router = _router().bfloat16()
    weights, _, shares = router(X.bfloat16())
    assert weights.dtype == shares.dtype == torch.float32


def test_sigmoids_that_underflow_leave_finite_weights() -> None:
    router = _router(router_score="sigmoid").float()
    router.weight.data.fill_(-1e4)
    weights, _, shares = router(X.float().abs())
    assert weights.isfinite().all() and shares.isfinite().all()


def test_the_shared_expert_sees_every_token() -> None:
    layer = MoeFeedForward(_config(shared_expert_width=12)).double()
    assert layer.shared_expert is not None
    with_shared, _ = layer(X, None)
    shared, layer.shared_expert = layer.shared_expert, None
    without, _ = layer(X, None)
    torch.testing.assert_close(with_shared, without + shared(X))


def test_only_valid_tokens_are_counted() -> None:
    layer = MoeFeedForward(_config(balance_loss=1.0)).double()
    valid = torch.tensor([[True, True, False, False, False], [False] * 5])
    _, routing = layer(X, valid)
    assert routing is not None
    picked: Tensor = layer.router(X)[1][0, :2]
    assert torch.equal(routing.load, torch.bincount(picked.flatten(), minlength=6))
    _, alone = layer(X[:1, :2], valid[:1, :2])
    assert alone is not None
    torch.testing.assert_close(routing.balance_loss, alone.balance_loss)
    assert layer(X, None)[1] is None
