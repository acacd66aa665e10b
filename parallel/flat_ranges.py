"""Exchanges flat ranges of a tensor for rows of it, between the ranks that share it."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class FlatRanges:
    """Who holds what of one tensor, flattened and cut at any element.

    Attributes:
        shape: Shape of the tensor.
        bounds: Rank r of the group holds the elements from `bounds[r]` to below `bounds[r + 1]`.
    """

    shape: torch.Size
    bounds: tuple[int, ...]

    def to_rows(self, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This rank's rows, shared out as DTensor's `Shard(0)` does; all ranks of the group call this together.

        Args:
            flat: This rank's range, 1-D.
            group: The ranks that share the tensor.
        """
        rows = _exchange(flat, self.bounds, self._row_bounds, group)
        return rows.view(-1, *self.shape[1:])

    def to_flat(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This rank's range, 1-D, of what `to_rows` gives; all ranks of the group call this together."""
        return _exchange(rows.flatten(), self._row_bounds, self.bounds, group)

    @property
    def _row_bounds(self) -> tuple[int, ...]:
        num_rows, num_ranks = self.shape[0], len(self.bounds) - 1
        width = self.shape.numel() // num_rows if num_rows else 0
        rows_a_rank = -(-num_rows // num_ranks)
        return tuple(min(rank * rows_a_rank, num_rows) * width for rank in range(num_ranks + 1))


def _exchange(held: Tensor, have: tuple[int, ...], want: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """What this rank wants of a flat tensor, from the ranks that have it; each element travels once at most."""
    mine = group.rank()
    sent = [_overlap(have, mine, want, rank) for rank in range(group.size())]
    received = [_overlap(have, rank, want, mine) for rank in range(group.size())]
    result = held.new_empty(sum(received))
    dist.all_to_all_single(result, held.contiguous(), received, sent, group=group)
    return result


def _overlap(one: tuple[int, ...], of_one: int, other: tuple[int, ...], of_other: int) -> int:
    """Elements that two ranges have in common."""
    (start, end), (other_start, other_end) = list(pairwise(one))[of_one], list(pairwise(other))[of_other]
    return max(0, min(end, other_end) - max(start, other_start))
