"""Lets modules of a model that look at whole rows of a batch do so where ranks share sequences."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.sequence_cut import SequenceCut


class RowSums(nn.Module):
    """Completes the sums over a row of which each rank has those of its own tokens.

    Args:
        group: The ranks that share a sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, sums: Tensor) -> Tensor:
        """The sums over whole rows.

        Args:
            sums: Those over this rank's tokens, without a gradient.
        """
        whole = sums.clone()
        dist.all_reduce(whole, group=self.group)
        return whole


class OfWholeRows(nn.Module):
    """Gives a module whole sequences, and its caller this rank's part of what it returns.

    Args:
        inner: The module, which knows no gradient.
        group: The ranks that share a sequence.
        cut: How they do.
    """

    def __init__(self, inner: nn.Module, group: dist.ProcessGroup, cut: SequenceCut) -> None:
        super().__init__()
        self.inner, self.group, self.cut = inner, group, cut

    def forward(self, own: Tensor) -> Any:
        """What the module says of this rank's tokens.

        Args:
            own: Something of each token, without a gradient; the sequence is the second dim.
        """
        parts = [torch.empty_like(own) for _ in range(self.cut.degree)]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return self.cut.part(self.inner(self.cut.join(parts)))
