"""DDP whose optimizer state is sharded: each rank updates its part of every parameter, then all exchange the parts."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from parallel.ddp import Ddp
from parallel.local_step import step_on_local_shards
from parallel.mesh import Mesh


class Zero1(Ddp):
    """The `zero1` backend.

    State is kept as DTensors split by rows, so it saves and loads as any other layout does; that, and a step on views
    of the parameters instead of copies, is why torch's `ZeroRedundancyOptimizer` is not used, whose state dict is whole
    objects by rank.
    """

    def prepare_optimizer(self, optimizer: Optimizer, mesh: Mesh) -> None:
        """Lets the optimizer step on this rank's rows, and then exchanges the rows."""
        step_on_local_shards(optimizer, RowShards(mesh["loss"]))


class RowShards:
    """An even share of the rows of every parameter; the last ranks may have fewer or none."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """Looks up this rank's place.

        Args:
            mesh: The 1-D mesh of the ranks that hold whole parameters.
        """
        self.mesh, self.rank, self.degree = mesh, mesh.get_local_rank(), mesh.size()

    def part(self, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        """This rank's rows."""
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        return self._rows(tensor, self.rank)

    def whole(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """A DTensor split by rows."""
        return DTensor.from_local(
            part, self.mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    @torch.no_grad()
    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sends this rank's updated rows to the others, one all-gather a dtype."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, same in by_dtype.items():
            # As many elements from every rank: those of rank 0, which has the most.
            size = sum(self._rows(parameter, 0).numel() for parameter in same)
            mine = torch.zeros(size, dtype=dtype, device=same[0].device)
            _copy(mine, [self._rows(parameter, self.rank) for parameter in same], out=False)
            everyone = mine.new_empty(size * self.degree)
            dist.all_gather_single(everyone, mine, group=self.mesh.get_group())
            for rank, theirs in enumerate(everyone.chunk(self.degree)):
                if rank != self.rank:
                    _copy(theirs, [self._rows(parameter, rank) for parameter in same], out=True)

    def _rows(self, tensor: Tensor, rank: int) -> Tensor:
        rows = -(-tensor.shape[0] // self.degree)
        start = min(rank * rows, tensor.shape[0])
        return tensor.detach()[start : start + rows]


def _copy(flat: Tensor, parts: list[Tensor], *, out: bool) -> None:
    """Copies between a flat buffer and parts that lie in it one after the other; `out` to the parts."""
    start = 0
    for part in parts:
        piece = flat[start : start + part.numel()].view(part.shape)
        start += part.numel()
        (part.copy_(piece) if out else piece.copy_(part))
