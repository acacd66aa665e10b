"""Keeps the two copies of a tied parameter alike that the first and the last stage of a pipeline hold."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from parallel.plan import ParallelPlan
from parallel.replicas import local_part
from parallel.stages import Stage


class TiedStages:
    """Parameters of the first stage of which the last one has a copy.

    Both get the sum of the two gradients and so take the same steps.
    """

    def __init__(
        self, parts: Mapping[Stage, nn.Module], stages: Sequence[Stage], plan: ParallelPlan, group: dist.ProcessGroup
    ) -> None:
        """Looks which of the two stages are this rank's.

        Args:
            parts: This rank's stages.
            stages: All stages, in order.
            plan: That of the whole model.
            group: This rank's pipeline.
        """
        self._group, self._ends = group, (stages[0].rank, stages[-1].rank)
        self._names = plan.tied
        self._first, self._last = (
            next((part for stage, part in parts.items() if stage is end), None) for end in (stages[0], stages[-1])
        )

    @property
    def copies(self) -> list[nn.Parameter]:
        """Those of the last stage, if it is this rank's."""
        return [] if self._last is None else [self._last.get_parameter(name) for _, name in self._names]

    @property
    def _originals(self) -> list[nn.Parameter]:
        return [] if self._first is None else [self._first.get_parameter(name) for name, _ in self._names]

    @torch.no_grad()
    def refresh(self) -> None:
        """Where one rank has both, its optimizer knows the first only."""
        if self._first is not None and self._last is not None:
            for original, copied in zip(self._originals, self.copies, strict=True):
                local_part(copied).copy_(local_part(original))
                copied.grad = None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Gives both the sum of the two gradients."""
        if self._first is not None and self._last is not None:
            for original, copied in zip(self._originals, self.copies, strict=True):
                if original.grad is not None and copied.grad is not None:
                    local_part(original.grad).add_(local_part(copied.grad))
                copied.grad = None
            return
        peer = self._ends[0] if self._first is None else self._ends[1]
        for own in self._originals or self.copies:
            if own.grad is None:
                continue
            mine = local_part(own.grad)
            theirs = torch.empty_like(mine)
            ops = [
                dist.P2POp(dist.isend, mine.contiguous(), group=self._group, group_peer=peer),
                dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            mine.add_(theirs)
