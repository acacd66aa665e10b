"""Counts what a sum over ranks sends, around a ring beside through one rank, and holds both against the library's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import CollectiveCounter, Mesh, ParallelConfig, build_mesh
from recipes.launchers import world_size_to_come
from recipes.ring.all_reduce import central_all_reduce, ring_all_reduce


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the sum over some ranks took.

    Attributes:
        num_ranks: N.
        padded_bytes: P, with the zeros that make N divide it.
        ring_bytes: Most that a rank sent around the ring.
        ring_theory_bytes: 2 P (N - 1) / N.
        central_bytes: What rank 0 received and sent in the central sum.
        central_theory_bytes: 2 P (N - 1), of P without zeros.
        largest_error: Largest share of the allowed difference to the library's sum, over ranks and elements.
    """

    num_ranks: int
    padded_bytes: int
    ring_bytes: int
    ring_theory_bytes: int
    central_bytes: int
    central_theory_bytes: int
    largest_error: float

    @property
    def is_right(self) -> bool:
        """Whether the sums are those of the library, and what was sent is what theory says."""
        sent = (self.ring_bytes, self.central_bytes)
        return sent == (self.ring_theory_bytes, self.central_theory_bytes) and self.largest_error <= 1


def measure(num_elements: int) -> list[Row]:
    """Sums over the first 2, 3, ... ranks of the job; every rank calls this.

    Args:
        num_elements: Float64 numbers that every rank brings.

    Returns:
        A row for each number of ranks.

    Raises:
        ValueError: If the job has one rank.
    """
    # NCCL wants a GPU for each rank; gloo takes any number of ranks.
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= world_size_to_come(None)
    mesh = build_mesh(ParallelConfig(), "cuda" if on_gpus else "cpu")
    if mesh.size < 2:
        raise ValueError("a ring needs at least 2 ranks, this job has 1; use --nproc")
    generator = torch.Generator().manual_seed(dist.get_rank())
    mine = torch.randn(num_elements, dtype=torch.float64, generator=generator).to(mesh.device)
    rows = []
    for num_ranks in range(2, mesh.size + 1):
        group = dist.new_group(list(range(num_ranks)))
        if dist.get_rank() < num_ranks:
            rows.append(_measure_group(mine, mesh, group))
    return rows


def _measure_group(mine: Tensor, mesh: Mesh, group: dist.ProcessGroup) -> Row:
    num_ranks, num_bytes = group.size(), mine.numel() * mine.element_size()
    ring, ring_bytes = _counted(ring_all_reduce, mine, mesh, group, ("send",))
    central, central_bytes = _counted(central_all_reduce, mine, mesh, group, ("send", "recv"))
    library, magnitude = mine.clone(), mine.abs()
    dist.all_reduce(library, group=group)
    dist.all_reduce(magnitude, group=group)
    # Two orders of adding the same N numbers (Higham, "Accuracy and Stability", section 4.2).
    bound = num_ranks * torch.finfo(mine.dtype).eps * magnitude
    error = torch.stack([ring - library, central - library]).abs().div(bound).amax() if mine.numel() else mine.sum()
    worst = torch.stack([error, error.new_tensor(ring_bytes), error.new_tensor(central_bytes)])
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    padded_bytes = -(-mine.numel() // num_ranks) * num_ranks * mine.element_size()
    return Row(
        num_ranks=num_ranks,
        padded_bytes=padded_bytes,
        ring_bytes=int(worst[1]),
        ring_theory_bytes=2 * padded_bytes * (num_ranks - 1) // num_ranks,
        central_bytes=int(worst[2]),
        central_theory_bytes=2 * num_bytes * (num_ranks - 1),
        largest_error=float(worst[0]),
    )


def _counted(
    all_reduce: Callable[[Tensor, dist.ProcessGroup], Tensor],
    mine: Tensor,
    mesh: Mesh,
    group: dist.ProcessGroup,
    kinds: tuple[str, ...],
) -> tuple[Tensor, int]:
    """The sum, and the bytes of those kinds that this rank put into it."""
    with CollectiveCounter(mesh) as counter:
        total = all_reduce(mine, group)
    return total, sum(each.payload_bytes for each in counter.records if each.kind in kinds)
