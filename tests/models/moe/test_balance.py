"""Tests of the load of experts and of what evens it out."""

import pytest
import torch

from models.moe import Moe, MoeConfig
from models.moe.balance import balance_loss, bias_updates, count
from parallel import Batch, ParallelConfig
from parallel.batch import IGNORE_INDEX
from tests.models.moe.small_moe import build
from tests.parallel.small_model import sgd
from tests.ranks import run_ranks


def test_an_even_load_has_a_loss_of_one_a_token_and_a_collapsed_one_of_many() -> None:
    valid = torch.ones(2, 8, dtype=torch.bool)
    experts = torch.arange(32).view(2, 8, 2) % 4
    even = torch.full((2, 8, 4), 0.25)
    assert balance_loss(even, count(experts, valid, 4), valid).item() == 16
    collapsed = torch.zeros(2, 8, 4)
    collapsed[..., 0] = 1
    assert balance_loss(collapsed, count(torch.zeros(2, 8, 1, dtype=torch.int64), valid, 4), valid).item() == 64


def test_the_loss_of_a_batch_is_the_sum_over_its_rows_and_over_parts_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(3, 8, 4, generator=generator, dtype=torch.float64).softmax(-1)
    experts = shares.topk(2).indices
    valid = torch.rand(3, 8, generator=generator) < 0.6
    valid[1] = False
    whole = balance_loss(shares, count(experts, valid, 4), valid)
    rows = [
        balance_loss(s[None], count(e[None], v[None], 4), v[None])
        for s, e, v in zip(shares, experts, valid, strict=True)
    ]
    torch.testing.assert_close(torch.stack(rows).sum(), whole, rtol=1e-14, atol=0)
    assert rows[1] == 0
    # A rank that holds a part of each row takes the counts of the whole rows, which are the sum over ranks.
    counts = sum(count(experts[:, part], valid[:, part], 4) for part in (slice(0, 3), slice(3, 8)))
    assert isinstance(counts, torch.Tensor)
    parts = [balance_loss(shares[:, part], counts, valid[:, part]) for part in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-14, atol=0)


def test_biases_of_experts_above_the_mean_fall_and_of_those_below_rise() -> None:
    load = torch.tensor([[3, 1, 2, 2], [0, 0, 0, 1]])
    expected = torch.tensor([[-0.5, 0.5, 0, 0], [0.5, 0.5, 0.5, -0.5]])
    assert torch.equal(bias_updates(load, 0.5), expected)


def test_the_value_is_the_loss_of_the_predictions_alone() -> None:
    tokens, labels = torch.randint(0, 260, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    values = []
    for weight in (0.0, 0.5):
        torch.manual_seed(0)
        values.append(Moe(MoeConfig(num_layers=2, balance_loss=weight))(tokens, labels=labels))
    assert torch.equal(*values)


def test_parts_of_a_pipeline_hand_the_balance_loss_on() -> None:
    torch.manual_seed(0)
    config = MoeConfig(num_layers=3, balance_loss=0.5)
    model = Moe(config).double()
    tokens, labels = torch.randint(0, 260, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    labels[0, 3:] = IGNORE_INDEX
    loss = model(tokens, labels=labels)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    blocks, norm, head = model.blocks, model.norm, model.head
    model.blocks, model.norm, model.head = torch.nn.ModuleDict({"0": blocks["0"]}), None, None
    hidden, balance = model(tokens, labels=labels)
    model.blocks = torch.nn.ModuleDict({name: blocks[name] for name in ("1", "2")})
    model.embed, embed, model.norm, model.head = None, model.embed, norm, head
    staged = model(hidden, balance, labels=labels)
    model.embed, model.blocks = embed, blocks
    assert torch.equal(staged, loss)
    gradients = torch.autograd.grad(staged, list(model.parameters()))
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def _imbalance(balance_rate: float) -> list[float]:
    """Largest load over mean load, step by step, of a model whose weights hardly move."""
    trained = build(ParallelConfig(data_parallel="none"), {"balance_rate": balance_rate, "router_score": "sigmoid"})
    optimizer = trained.build_optimizer(lambda named: torch.optim.SGD(list(named.values()), lr=1e-6))
    tokens = torch.randint(0, 260, (8, 32), generator=torch.Generator().manual_seed(0))
    imbalances = []
    for _ in range(30):
        result = trained.forward_backward([Batch.from_tokens(tokens, tokens)])
        assert result.expert_load is not None and {sum(layer) for layer in result.expert_load} == {8 * 32 * 2}
        imbalances.append(max(max(layer) * len(layer) / sum(layer) for layer in result.expert_load))
        optimizer.step()
    return imbalances


def test_selection_biases_move_the_load_towards_equal() -> None:
    (with_bias,) = run_ranks(1, _imbalance, 0.01)
    (without,) = run_ranks(1, _imbalance, 0.0)
    assert with_bias[0] == without[0] > 1.4
    assert without[-1] == pytest.approx(without[0], rel=0.05)
    assert with_bias[-1] < 1.1


def _biases_of_steps_not_taken() -> list[float]:
    trained = build(ParallelConfig(data_parallel="none"), {"balance_rate": 0.02})
    optimizer = trained.build_optimizer(sgd)
    tokens = torch.randint(0, 260, (8, 32), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_tokens(tokens, tokens)
    sizes = []

    def note() -> None:
        named = trained.named_parameters()
        sizes.append(named["blocks.0.feed_forward.router.selection_bias"].abs().max().item())

    trained.source(tokens, labels=tokens)  # outside of a step
    trained.forward_backward([batch])
    trained.forward_backward([batch])  # the step before was skipped
    note()
    optimizer.step()
    note()
    optimizer.step()  # nothing new was counted
    trained.evaluate([batch])
    note()
    return sizes


def test_biases_move_once_for_each_step_of_the_optimizer() -> None:
    (sizes,) = run_ranks(1, _biases_of_steps_not_taken)
    assert sizes == [0.0, pytest.approx(0.02), pytest.approx(0.02)]
