"""Which of a row's tokens its experts have room for."""

import math

from torch import Tensor, nn

# B batch, S sequence, K experts of a token, E experts


class Capacity(nn.Module):
    """Lets each expert take as many tokens of a row as a factor of an even load, the first ones of the sequence.

    By row and in the order of the sequence, so that who is dropped depends neither on the other rows of a batch nor on
    which ranks hold them, and no token on those after it. A rank that holds a part of a row needs the choices of the
    whole one; context parallel brings them.

    Args:
        factor: Room of an expert over an even load.
        num_experts: E.
    """

    def __init__(self, factor: float, num_experts: int) -> None:
        super().__init__()
        self.factor, self.num_experts = factor, num_experts

    def forward(self, experts_BSK: Tensor) -> Tensor:
        """Whether each of a token's experts has room for it, bool [B, S, K].

        Args:
            experts_BSK: Experts of each token of whole rows, different ones, int64 [B, S, K].
        """
        num_even = experts_BSK.shape[1] * experts_BSK.shape[2] / self.num_experts
        ones_BSE = experts_BSK.new_zeros(*experts_BSK.shape[:2], self.num_experts).scatter_(2, experts_BSK, 1)
        places_BSE = ones_BSE.cumsum(1)
        return places_BSE.gather(2, experts_BSK) <= max(1, math.ceil(self.factor * num_even))
