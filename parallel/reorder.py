"""Rows in another order, with a gradient that is one more reordering."""

from typing import Any

import torch
from torch import Tensor

# R rows, D width


class Reorder(torch.autograd.Function):
    """Rows in another order; autograd would add up the gradients of rows, which here come once each."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        """Row i of the result is row `order_R[i]` of `x_RD`; `inverse_R` leads back."""
        ctx.save_for_backward(inverse_R)
        return x_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        """The gradient's rows in the first order."""
        (inverse_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, inverse_R), None, None


def inverse_of(order_R: Tensor) -> Tensor:
    """The order that leads back.

    Args:
        order_R: A permutation of 0 to R - 1, int64 [R].
    """
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
