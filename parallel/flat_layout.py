"""What a rank holds of a flattened parameter, and the DTensor that ranks make up of it together."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Private: the placement that `fully_shard` gives rows which tensor parallelism has split before.
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from parallel.flat_ranges import FlatRanges
from parallel.gradients import sharded_views
from parallel.mesh import Mesh
from parallel.replicas import local_part


@dataclass(frozen=True)
class FlatLayout:
    """How one parameter is held.

    Attributes:
        shape: Shape of the whole parameter.
        part_shape: Shape of this rank's tensor-parallel part.
        tensor_parallel: How tensor parallelism has split it; None if not at all.
        views: Views of the mesh along which the parameter is split.
        ranges: Who holds what of the tensor-parallel part; None if every rank holds all of it.
    """

    shape: torch.Size
    part_shape: torch.Size
    tensor_parallel: Placement | None
    views: frozenset[str]
    ranges: FlatRanges | None = None

    @classmethod
    def before(cls, parameter: Tensor) -> "FlatLayout":
        """How a parameter is held before it is flattened."""
        return cls(
            shape=parameter.shape,
            part_shape=local_part(parameter).shape,
            tensor_parallel=parameter.placements[0] if isinstance(parameter, DTensor) else None,
            views=sharded_views(parameter),
        )

    def to_rows(self, held: Tensor, mesh: Mesh) -> Tensor:
        """A DTensor split by rows as `fully_shard` splits it, in memory of its own; `held` where it is whole.

        Args:
            held: The parameter as this rank holds it, or a tensor of that shape.
            mesh: The mesh that the parameter lives on, whose `fsdp` ranks call this together.
        """
        if self.ranges is None:
            return held
        rows: Placement = Shard(0)
        if self.tensor_parallel is not None and self.tensor_parallel.is_shard(0):
            rows = _StridedShard(0, split_factor=mesh.degree("tp"))
        placements = [Replicate(), rows, self.tensor_parallel or Replicate()]
        on = mesh.hybrid if mesh.degree("tp") == 1 else mesh.parameters["dp_replicate", "fsdp", "tp"]
        return DTensor.from_local(
            self.ranges.to_rows(held.detach(), mesh.group("fsdp")),
            on,
            placements[: on.ndim],
            run_check=False,
            shape=self.shape,
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    @torch.no_grad()
    def fill(self, held: Tensor, rows: Tensor, mesh: Mesh) -> None:
        """Fills what a rank holds from what `to_rows` gives; the `fsdp` ranks call this together."""
        if self.ranges is not None:
            held.copy_(self.ranges.to_flat(local_part(rows), mesh.group("fsdp")))
