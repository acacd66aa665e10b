"""The experts of one layer, and how tokens get to them and back."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.layers.feed_forward import swiglu
from parallel.reorder import Reorder, inverse_of

# T tokens, K experts of a token, R = T * K rows, E experts, D model, H width of an expert


NO_EXPERT = -1
"""Stands in the place of an expert that had no room for a token."""


class Experts(nn.Module):
    """Gated feed-forward layers, each for rows of its own.

    Attributes:
        num_experts: Experts of the layer, on all ranks.
        gate_proj: [E, D, H]; under expert parallel those of this rank.
        up_proj: [E, D, H].
        down_proj: [E, H, D].

    Args:
        num_experts: Experts.
        width: Width of the residual stream.
        hidden_width: Width between the projections of one expert.
    """

    def __init__(self, num_experts: int, width: int, hidden_width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_proj = nn.Parameter(torch.empty(num_experts, width, hidden_width))
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden_width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_width, width))
        for each in self.parameters():
            # As nn.Linear does: what empty memory holds may be NaN.
            nn.init.uniform_(each, -1 / math.sqrt(each.shape[1]), 1 / math.sqrt(each.shape[1]))

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """What each expert makes of its rows, [R, D].

        Args:
            x_RD: Rows of the first expert, then those of the second, and so on, [R, D].
            counts_E: Rows of each expert that lies on this rank, int64 [E]; they sum to R.
        """
        weights = (self.gate_proj, self.up_proj, self.down_proj)
        gate, up, down = (each.to_local() if isinstance(each, DTensor) else each for each in weights)
        hidden_RH = swiglu(grouped_matmul(x_RD, gate, counts_E), grouped_matmul(x_RD, up, counts_E))
        return grouped_matmul(hidden_RH, down, counts_E)


class LocalDispatch(nn.Module):
    """Brings tokens to experts that all lie on this rank, and sums what they make of each token.

    Args:
        drops: Whether tokens may have `NO_EXPERT`; to know how many the host then waits for the device.
    """

    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        self.drops = drops

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: "Experts") -> Tensor:
        """The weighted sum over each token's experts, [T, D].

        Args:
            x_TD: Tokens, [T, D].
            weights_TK: Weight of each of a token's experts, [T, K].
            experts_TK: Their numbers, int64 [T, K].
            experts: Computes the rows of all experts, see `Experts`.
        """
        chosen_R = experts_TK.flatten()
        # Stable, so that the order of a token's rows does not depend on what else is in the batch.
        order_R = chosen_R.argsort(stable=True)
        inverse_R = inverse_of(order_R)
        taken_R = (chosen_R >= 0).to(torch.int64)
        counts_E = chosen_R.new_zeros(experts.num_experts).scatter_add_(0, chosen_R.clamp(min=0), taken_R)
        rows_RD = Reorder.apply(x_TD.repeat_interleave(experts_TK.shape[1], dim=0), order_R, inverse_R)
        if self.drops:
            # Rows without an expert come first in that order.
            num_dropped = len(chosen_R) - int(counts_E.sum())
            out_RD = F.pad(experts(rows_RD[num_dropped:], counts_E), (0, 0, num_dropped, 0))
        else:
            out_RD = experts(rows_RD, counts_E)
        out_T1D = weights_TK.unsqueeze(1) @ Reorder.apply(out_RD, inverse_R, order_R).unflatten(0, experts_TK.shape)
        return out_T1D.squeeze(1)


def grouped_matmul(x_RI: Tensor, weight_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """Multiplies each group of rows with a matrix of its own, [R, O].

    Args:
        x_RI: Rows of the first group, then those of the second, and so on, [R, I].
        weight_EIO: A matrix for each group, [E, I, O].
        counts_E: Rows of each group, int64 [E]; they sum to R.
    """
    if has_grouped_kernel(weight_EIO):
        return F.grouped_mm(x_RI, weight_EIO, offs=counts_E.cumsum(0, dtype=torch.int32))
    groups = zip(x_RI.split(counts_E.tolist()), weight_EIO.unbind(), strict=True)
    return torch.cat([rows @ matrix for rows, matrix in groups])


def has_grouped_kernel(weight_EIO: Tensor) -> bool:
    """Whether one call of torch multiplies all groups: floats of at most 32 bits, rows of whole 16 bytes.

    Args:
        weight_EIO: A matrix for each group, [E, I, O].
    """
    row_bytes = [size * weight_EIO.element_size() for size in weight_EIO.shape[1:]]
    return weight_EIO.dtype != torch.float64 and not any(each % 16 for each in row_bytes)
