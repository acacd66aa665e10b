"""Tests of the room that experts have for tokens."""

from typing import Any

import pytest
import torch

from models.moe import Moe, MoeConfig
from models.moe.capacity import Capacity
from models.moe.experts import NO_EXPERT, Experts, LocalDispatch
from models.moe.feed_forward import MoeFeedForward


def test_the_first_tokens_of_each_row_are_taken_up_to_the_capacity() -> None:
    # An even load of 4 tokens x 2 experts of each over 4 experts is 2.
    experts_BSK = torch.tensor([[[0, 1], [1, 0], [0, 3], [1, 0]], [[3, 2], [2, 3], [0, 1], [1, 0]]])
    kept = Capacity(1.0, num_experts=4)(experts_BSK)
    first = [[True, True], [True, True], [False, True], [False, False]]
    assert kept.tolist() == [first, [[True, True]] * 4]
    assert Capacity(2.0, num_experts=4)(experts_BSK).all()
    # Each expert takes one, however small the factor.
    smallest = [[True, True], [False, False], [False, True], [False, False]]
    assert Capacity(1e-9, num_experts=4)(experts_BSK)[0].tolist() == smallest


def test_who_is_taken_depends_on_no_other_row_and_on_no_token_behind() -> None:
    generator = torch.Generator().manual_seed(0)
    experts_BSK = torch.rand(6, 20, 8, generator=generator).topk(2).indices
    capacity = Capacity(0.7, num_experts=8)
    kept = capacity(experts_BSK)
    assert not kept.all()
    for row in range(6):
        assert torch.equal(capacity(experts_BSK[row : row + 1]), kept[row : row + 1])
    changed = experts_BSK.clone()
    changed[:, 10:] = changed[:, 10:].flip(0)
    assert torch.equal(capacity(changed)[:, :10], kept[:, :10])


def test_a_dropped_token_gets_nothing_from_the_expert_and_gives_it_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(5, 6, 10).double()
    x_TD = torch.randn(9, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weights_TK = torch.rand(9, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    experts_TK = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(9)])
    kept_TK = torch.rand(9, 2, generator=generator) < 0.6
    kept_TK[0] = False
    inputs = (x_TD, weights_TK, *experts.parameters())
    dropped = LocalDispatch(drops=True)(x_TD, weights_TK, experts_TK.masked_fill(~kept_TK, NO_EXPERT), experts)
    weighted = LocalDispatch()(x_TD, weights_TK * kept_TK, experts_TK, experts)
    torch.testing.assert_close(dropped, weighted, rtol=1e-12, atol=1e-14)
    grad = torch.randn(dropped.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(dropped, inputs, grad), torch.autograd.grad(weighted, inputs, grad)
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
    assert not dropped[0].any()


def test_no_token_at_all_may_be_left() -> None:
    experts = Experts(3, 4, 4)
    x_TD = torch.randn(2, 4, requires_grad=True)
    out = LocalDispatch(drops=True)(x_TD, torch.rand(2, 1), torch.full((2, 1), NO_EXPERT), experts)
    assert out.shape == (2, 4) and not out.any()
    assert not torch.autograd.grad(out.sum(), x_TD)[0].any()


def _layer(**fields: Any) -> MoeFeedForward:
    config = MoeConfig(**{"width": 8, "num_heads": 2, "num_kv_heads": 1, "num_experts": 6, "expert_width": 4, **fields})
    torch.manual_seed(0)
    return MoeFeedForward(config).double()


def test_load_is_what_came_and_the_balance_loss_of_what_was_picked() -> None:
    x_BSD, valid_BS = torch.randn(2, 5, 8, dtype=torch.float64), torch.ones(2, 5, dtype=torch.bool)
    _, whole = _layer(balance_loss=0.1)(x_BSD, valid_BS)
    _, cut = _layer(balance_loss=0.1, capacity_factor=0.5)(x_BSD, valid_BS)
    # An even load of a row is 10 / 6, so that one token of each row has room.
    assert whole.load.sum() == 20 and (cut.load <= 2).all() and cut.load.sum() < 20
    assert torch.equal(cut.balance_loss, whole.balance_loss)


def test_tokens_are_dropped_where_there_is_a_loss_and_nowhere_else() -> None:
    x_BSD, valid_BS = torch.randn(2, 5, 8, dtype=torch.float64), torch.ones(2, 5, dtype=torch.bool)
    whole, cut = _layer(), _layer(capacity_factor=0.5)
    assert torch.equal(cut(x_BSD, None)[0], whole(x_BSD, None)[0])
    assert not torch.equal(cut(x_BSD, valid_BS)[0], whole(x_BSD, valid_BS)[0])


def test_the_names_of_a_model_do_not_change() -> None:
    with torch.device("meta"):
        names = [list(Moe(MoeConfig(capacity_factor=factor)).state_dict()) for factor in (None, 1.25)]
    assert names[0] == names[1]


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_factor_that_leaves_no_room_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=f"capacity_factor={factor} must be positive, or None to drop no token"):
        MoeConfig(capacity_factor=factor)
