"""How evenly experts are loaded, and what moves them towards an even load.

Only tokens whose prediction enters the loss count, so that padding changes nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

# B batch, S sequence, K experts of a token, E experts, L layers with experts


class Routing(NamedTuple):
    """What a layer says of how it sent its tokens.

    Attributes:
        load: Valid tokens that came to each expert, int64 [E].
        balance_loss: Sum over valid tokens of the balance loss, a scalar; None where it is not wanted.
    """

    load: Tensor
    balance_loss: Tensor | None


class WholeRows(nn.Module):
    """Counts of whole rows of a batch, where this rank holds them whole; context parallel sums over its ranks."""

    def forward(self, counts_BE: Tensor) -> Tensor:
        """The counts of the whole rows, [B, E].

        Args:
            counts_BE: Counts of this rank's part of each row, [B, E].
        """
        return counts_BE


def count(experts_BSK: Tensor, valid_BS: Tensor, num_experts: int) -> Tensor:
    """Valid tokens that came to each expert, by row, int64 [B, E].

    Args:
        experts_BSK: Experts of each token, int64 [B, S, K]; negative where there is none.
        valid_BS: Which tokens count, bool [B, S].
        num_experts: E.
    """
    counts_BE = valid_BS.new_zeros(len(valid_BS), num_experts, dtype=torch.int64)
    ones_BSK = (valid_BS.unsqueeze(-1) & (experts_BSK >= 0)).to(torch.int64)
    return counts_BE.scatter_add_(1, experts_BSK.clamp(min=0).flatten(1), ones_BSK.flatten(1))


def balance_loss(shares_BSE: Tensor, counts_BE: Tensor, valid_BS: Tensor) -> Tensor:
    """Sum over valid tokens of E * sum_e f_e p_e, a scalar; each term is 1 where the load is even.

    p is the token's own share of its score that went to expert e, f the share of expert e in what the valid tokens of
    its row were sent to. It is defined by row, as in DeepSeek-V3, and not over the batch, as in Switch: f of a whole
    batch is known to no rank and no micro-batch, and means of f and p over parts do not multiply to those of the whole.
    By row the loss is a sum over tokens like the one of predictions, so it is exact for any split into rows. A rank
    that holds a part of a row needs f, which has no gradient, of the whole one; p is its own.

    Args:
        shares_BSE: Score of each expert over the sum of all, [B, S, E].
        counts_BE: Valid tokens of the whole row that came to each expert, [B, E].
        valid_BS: Which tokens count, bool [B, S].

    Source: Fedus et al. 2021, "Switch Transformers", equation 4; DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20.
    """
    num_experts = counts_BE.shape[1]
    frequency_BE = counts_BE / counts_BE.sum(1, keepdim=True).clamp_(min=1)
    sums_BE = (shares_BSE * valid_BS.unsqueeze(-1)).sum(1)
    return num_experts * (frequency_BE.to(sums_BE.dtype) * sums_BE).sum()


def bias_updates(load_LE: Tensor, rate: float) -> Tensor:
    """What a step adds to each selection bias, float32 [L, E]: `rate` up for less than the mean load, down for more.

    Args:
        load_LE: Valid tokens of the global batch that came to each expert, int64 [L, E].
        rate: Size of an update.

    Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", algorithm 1.
    """
    # In integers, so that no rounding decides which side of the mean an expert is on.
    error_LE = load_LE.sum(1, keepdim=True) - load_LE * load_LE.shape[1]
    return error_LE.sign().float() * rate


class AddGradient(torch.autograd.Function):
    """A loss by whose side another is minimized: the value is the first one's, the gradient that of the sum."""

    @staticmethod
    def forward(ctx: object, loss: Tensor, beside: Tensor) -> Tensor:
        """The first loss."""
        # No view: fully_shard warns of a result that is one.
        return loss.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The same gradient for both."""
        return grad, grad
