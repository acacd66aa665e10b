"""Tests of experts and of how tokens get to them."""

import pytest
import torch
from torch import Tensor

from models.moe.experts import Experts, LocalDispatch, grouped_matmul, has_grouped_kernel

COUNTS = [3, 0, 7, 1, 0]


def _experts(width: int, hidden_width: int, dtype: torch.dtype) -> tuple[Experts, Tensor]:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(len(COUNTS), width, hidden_width).to(dtype)
    for each in experts.parameters():
        each.data = torch.randn(each.shape, generator=generator, dtype=torch.float64).to(dtype)
    rows = torch.randn(sum(COUNTS), width, generator=generator, dtype=torch.float64).to(dtype)
    return experts, rows.requires_grad_()


def _run(experts: Experts, rows: Tensor) -> list[Tensor]:
    out = experts(rows, torch.tensor(COUNTS))
    return [out, *torch.autograd.grad(out, (rows, *experts.parameters()), torch.ones_like(out))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_grouped_kernel_gives_the_numbers_of_the_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, rows = _experts(16, 24, dtype)
    assert has_grouped_kernel(experts.gate_proj)
    grouped = _run(experts, rows)
    monkeypatch.setattr("models.moe.experts.has_grouped_kernel", lambda weight: False)
    for one, other in zip(grouped, _run(experts, rows), strict=True):
        torch.testing.assert_close(one, other, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("width", "hidden_width", "dtype"),
    [(16, 24, torch.float64), (6, 8, torch.float32), (8, 6, torch.float32), (8, 12, torch.bfloat16)],
)
def test_the_loop_serves_types_and_widths_that_the_kernel_does_not(
    width: int, hidden_width: int, dtype: torch.dtype
) -> None:
    experts, rows = _experts(width, hidden_width, dtype)
    assert not has_grouped_kernel(experts.gate_proj)
    assert all(each.isfinite().all() for each in _run(experts, rows))


def test_an_expert_without_rows_has_a_gradient_of_zeros() -> None:
    for width in (16, 6):
        experts, rows = _experts(width, 8, torch.float32)
        for gradient in _run(experts, rows)[2:]:
            assert not gradient[1].any() and not gradient[4].any() and gradient[2].any()


def test_no_rows_at_all_have_gradients_too() -> None:
    for width in (16, 6):
        weight = torch.randn(3, width, 8, requires_grad=True)
        out = grouped_matmul(torch.randn(0, width), weight, torch.zeros(3, dtype=torch.int64))
        (gradient,) = torch.autograd.grad(out, weight, torch.ones(0, 8))
        assert out.shape == (0, 8) and not gradient.any()


def test_each_token_gets_the_weighted_sum_of_its_experts() -> None:
    experts, _ = _experts(6, 10, torch.float64)
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(9, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weights_TK = torch.rand(9, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    experts_TK = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(9)])
    written_out = []
    for x_D, weights_K, experts_K in zip(x_TD, weights_TK, experts_TK, strict=True):
        rows = []
        for weight, expert in zip(weights_K, experts_K.tolist(), strict=True):
            gate, up = x_D @ experts.gate_proj[expert], x_D @ experts.up_proj[expert]
            rows.append(weight * ((torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert]))
        written_out.append(torch.stack(rows).sum(0))
    inputs = (x_TD, weights_TK, *experts.parameters())
    ours, theirs = LocalDispatch()(x_TD, weights_TK, experts_TK, experts), torch.stack(written_out)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    grad = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
