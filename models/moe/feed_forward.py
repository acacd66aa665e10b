"""The layer that sends each token to a few of many experts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.feed_forward import FeedForward
from models.moe.balance import Routing, WholeRows, balance_loss, count
from models.moe.capacity import Capacity
from models.moe.config import MoeConfig
from models.moe.experts import NO_EXPERT, Experts, LocalDispatch

# B batch, S sequence, D model, K experts of a token, E experts


class Router(nn.Module):
    """Scores experts for each token and picks the best.

    Attributes:
        weight: [E, D].
        selection_bias: Added to scores where experts are picked and nowhere else, [E]; a parameter without a gradient,
            which balancing moves once a step. None: there is none.

    Args:
        config: Shape of the model.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.score, self.normalize = config.router_score, config.normalize_top_k
        self.num_picked = config.num_experts_per_token
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.width))
        # As nn.Linear does: what empty memory holds may be NaN.
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False) if config.balance_rate else None
        self.selection_bias: nn.Parameter | None = bias

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Picks experts.

        Args:
            x_BSD: Normalized residual stream, [B, S, D].

        Returns:
            Weights of each token's experts, [B, S, K]; their numbers, int64 [B, S, K]; and the share of each expert in
            the token's scores, [B, S, E]. Weights and shares are float32, float64 in float64 models.
        """
        logits_BSE = F.linear(x_BSD, self.weight)
        logits_BSE = logits_BSE.to(torch.promote_types(logits_BSE.dtype, torch.float32))
        scores_BSE = logits_BSE.softmax(-1) if self.score == "softmax" else logits_BSE.sigmoid()
        ranked_BSE = scores_BSE.detach()
        if self.selection_bias is not None:
            ranked_BSE = ranked_BSE + self.selection_bias
        experts_BSK = ranked_BSE.topk(self.num_picked, dim=-1).indices
        weights_BSK = scores_BSE.gather(-1, experts_BSK)
        if self.normalize:
            weights_BSK = _shares(weights_BSK)
        return weights_BSK, experts_BSK, scores_BSE if self.score == "softmax" else _shares(scores_BSE)


class MoeFeedForward(nn.Module):
    """Sum of what a token's experts make of it, each by its weight, and of the shared expert.

    Attributes:
        router: Picks the experts.
        experts: All experts.
        dispatch: Brings tokens to experts and back; expert parallel replaces it.
        capacity: Says which tokens experts have room for. None: all.
        whole_rows: Completes the counts of a row; context parallel replaces it.
        shared_expert: Sees every token. None: there is none.

    Args:
        config: Shape of the model.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.with_loss = config.balance_loss > 0
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.width, config.expert_width)
        factor = config.capacity_factor
        self.capacity: nn.Module | None = None if factor is None else Capacity(factor, config.num_experts)
        self.dispatch: nn.Module = LocalDispatch(drops=factor is not None)
        self.whole_rows: nn.Module = WholeRows()
        shared = FeedForward(config.width, config.shared_expert_width) if config.shared_expert_width else None
        self.shared_expert: FeedForward | None = shared

    def forward(self, x_BSD: Tensor, valid_BS: Tensor | None) -> tuple[Tensor, Routing | None]:
        """What is added to the residual stream, [B, S, D], and where tokens went.

        Args:
            x_BSD: Normalized residual stream, [B, S, D].
            valid_BS: Which tokens enter the loss, bool [B, S]. None: there is no loss, and nothing is counted.
        """
        weights_BSK, experts_BSK, shares_BSE = self.router(x_BSD)
        taken_BSK = experts_BSK
        if self.capacity is not None and valid_BS is not None:
            taken_BSK = experts_BSK.masked_fill(~self.capacity(experts_BSK), NO_EXPERT)
        weights_TK = weights_BSK.flatten(0, 1).to(x_BSD.dtype)
        out_TD: Tensor = self.dispatch(x_BSD.flatten(0, 1), weights_TK, taken_BSK.flatten(0, 1), self.experts)
        out_BSD = out_TD.view_as(x_BSD)
        if self.shared_expert is not None:
            out_BSD = out_BSD + self.shared_expert(x_BSD)
        if valid_BS is None:
            return out_BSD, None
        num_experts = shares_BSE.shape[-1]
        counts_BE = count(experts_BSK, valid_BS, num_experts)
        loss = balance_loss(shares_BSE, self.whole_rows(counts_BE), valid_BS) if self.with_loss else None
        load_BE = counts_BE if taken_BSK is experts_BSK else count(taken_BSK, valid_BS, num_experts)
        return out_BSD, Routing(load=load_BE.sum(0), balance_loss=loss)


def _shares(scores: Tensor) -> Tensor:
    """Scores over their sum, which sigmoids far below zero may leave at zero."""
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
