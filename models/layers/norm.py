"""RMSNorm that is fast on the CPU too."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# N all leading dims as one, D normalized dim


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm over the last dim; on the CPU its gradient is written out.

    There torch composes norm and gradient of elementary operators, which takes twice the time and keeps three
    activations instead of one.

    Args:
        width: Components that are normalized together.
        eps: What is added to the mean square.
    """

    eps: float

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalized activations, in the shape of `x`.

        Args:
            x: Activations, [..., D].
        """
        written_out = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        if not written_out or x.dtype != self.weight.dtype or isinstance(x, DTensor):
            return super().forward(x)
        return _Normalize.apply(x, self.weight, self.eps)


class _Normalize(torch.autograd.Function):
    """x / rms(x) * weight, which keeps x and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse_rms = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, inverse_rms)
        return (x * inverse_rms).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, inverse_rms = ctx.saved_tensors
        normal = x * inverse_rms
        product_ND = (grad * normal).flatten(0, -2)
        grad_weight_D = product_ND.sum(0)
        # The part of the gradient along x, which normalization takes out, as a mean over the D components.
        along = torch.mv(product_ND, weight_D).div_(-x.shape[-1]).view(inverse_rms.shape)
        grad_x = torch.mul(grad, weight_D, out=product_ND.view(x.shape))
        return grad_x.addcmul_(normal, along).mul_(inverse_rms), grad_weight_D, None
