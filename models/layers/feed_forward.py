"""Gated feed-forward layer with the SwiGLU non-linearity."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Args:
        width: Width of the residual stream.
        hidden_width: Width between the projections.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden_width, bias=False)
        self.up_proj = nn.Linear(width, hidden_width, bias=False)
        self.down_proj = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """What is added to the residual stream, [B, S, D].

        Args:
            x_BSD: Normalized residual stream, [B, S, D].
        """
        out_BSD: Tensor = self.down_proj(swiglu(self.gate_proj(x_BSD), self.up_proj(x_BSD)))
        return out_BSD


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, which keeps its two arguments for backward and nothing more.

    Args:
        gate: Any shape.
        up: The same shape.
    """
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up.

    Autograd would keep silu(gate) beside gate and up, the widest activation of a block, to save what computing it
    again costs: next to nothing, as one product less is allocated.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
