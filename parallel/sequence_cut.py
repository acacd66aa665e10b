"""Which part of each sequence a rank holds under context parallel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SequenceCut:
    """A cut of sequences into one part a rank, as long on each.

    Attributes:
        degree: Ranks that share a sequence.
        rank: This rank's place among them.
        balanced: Cut into 2 * degree pieces, of which rank r holds the r-th from either end: under a causal mask each
            rank then has as much to attend to. Else rank r holds the r-th of `degree` pieces.
    """

    degree: int = 1
    rank: int = 0
    balanced: bool = False

    def part(self, whole: Tensor, rank: int | None = None, dim: int = 1) -> Tensor:
        """A rank's part of whole sequences.

        Args:
            whole: Anything with one entry for each token.
            rank: Whose; None: this rank's.
            dim: The dim of the sequence; the number of pieces divides it.
        """
        if self.degree == 1:
            return whole
        rank = self.rank if rank is None else rank
        if not self.balanced:
            return whole.chunk(self.degree, dim)[rank]
        pieces = whole.chunk(2 * self.degree, dim)
        return torch.cat([pieces[rank], pieces[-1 - rank]], dim)

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Whole sequences in order.

        Args:
            parts: Those of all ranks.
            dim: The dim of the sequence.
        """
        if not self.balanced:
            return torch.cat(list(parts), dim)
        near, far = zip(*(part.chunk(2, dim) for part in parts), strict=True)
        return torch.cat([*near, *reversed(far)], dim)
