"""Tests of RMSNorm."""

import pytest
import torch
from torch import nn

from models.layers.norm import RMSNorm


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 4, 8), (8, 8)])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_values_and_gradients_equal_those_of_torch(shape: tuple[int, ...], scale: float) -> None:
    x = (torch.randn(shape, dtype=torch.float64) * scale).requires_grad_()
    ours, theirs = RMSNorm(8, eps=1e-5).double(), nn.RMSNorm(8, eps=1e-5).double()
    weight = torch.randn(8, dtype=torch.float64)
    grad = torch.randn(shape, dtype=torch.float64)
    results = []
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
        out = norm(x)
        results.append((out, *torch.autograd.grad(out, (x, norm.weight), grad)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13)


def test_gradients_of_strided_activations_are_right() -> None:
    x = torch.randn(4, 6, 3, dtype=torch.float64).transpose(1, 2).requires_grad_()
    norm = RMSNorm(6, eps=1e-5).double()
    assert torch.autograd.gradcheck(norm, (x,))


def test_other_dtypes_are_left_to_torch() -> None:
    x = torch.randn(2, 8).bfloat16()
    assert torch.equal(RMSNorm(8, eps=1e-5).bfloat16()(x), nn.RMSNorm(8, eps=1e-5).bfloat16()(x))
