"""Sums over ranks by sends around a ring: a reduce-scatter, then an all-gather."""

import torch
import torch.distributed as dist
from torch import Tensor

# N ranks, C elements of a chunk


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums a tensor over ranks: reduce-scatter, then all-gather.

    Summing P bytes through one of N ranks makes that one receive and send P for each other rank: its traffic grows with
    N. Cut the P bytes into N chunks and let every chunk travel around the ring instead. In N - 1 sends each chunk has
    met every rank and its sum lies on one of them (reduce-scatter); in N - 1 more each rank has been handed all sums
    (all-gather). A rank sends 2 (N - 1) chunks of P / N bytes, which stays below 2 P however many ranks there are.

    Args:
        tensor: This rank's summand, of any shape, the same on every rank.
        group: The ranks.

    Returns:
        The sum, on every rank.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    chunks_NC = padded_chunks(tensor, group.size())
    ring_reduce_scatter(chunks_NC, group)
    ring_all_gather(chunks_NC, group)
    return chunks_NC.flatten()[: tensor.numel()].view_as(tensor)


def padded_chunks(tensor: Tensor, num_ranks: int) -> Tensor:
    """A copy in equal chunks, one a rank, zeros behind the last element: a chunk must not depend on the rank.

    Args:
        tensor: Of any shape.
        num_ranks: N.

    Returns:
        The chunks [N, C].
    """
    chunks_NC = tensor.new_zeros(num_ranks, -(-tensor.numel() // num_ranks))
    chunks_NC.view(-1)[: tensor.numel()] = tensor.flatten()
    return chunks_NC


def ring_reduce_scatter(chunks_NC: Tensor, group: dist.ProcessGroup) -> None:
    """Leaves the sum of row r on rank r; the other rows are partial sums then.

    Args:
        chunks_NC: This rank's summands, changed in place.
        group: The ranks.
    """
    rank, num_ranks = group.rank(), group.size()
    received_C = torch.empty_like(chunks_NC[0])
    for step in range(num_ranks - 1):
        # A rank passes on what it added to last, so each sum grows on its way to the rank that will own it.
        _pass_on(chunks_NC[(rank - step - 1) % num_ranks], received_C, group)
        chunks_NC[(rank - step - 2) % num_ranks] += received_C


def ring_all_gather(chunks_NC: Tensor, group: dist.ProcessGroup) -> None:
    """Gives row r of rank r to every rank.

    Args:
        chunks_NC: Of which row r counts on rank r, changed in place.
        group: The ranks.
    """
    rank, num_ranks = group.rank(), group.size()
    for step in range(num_ranks - 1):
        _pass_on(chunks_NC[(rank - step) % num_ranks], chunks_NC[(rank - step - 1) % num_ranks], group)


def _pass_on(sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
    """Sends to the next rank of the ring what the one before it will be sending us."""
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    # Both at once: if every rank sent before it received, all could wait for each other.
    both = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=after),
        dist.P2POp(dist.irecv, received, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def central_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums a tensor the obvious way: rank 0 gathers, adds, and sends the sum to each.

    Args:
        tensor: This rank's summand, the same shape on every rank.
        group: The ranks.

    Returns:
        The sum, on every rank.
    """
    total, peers = tensor.clone(), range(1, group.size())
    if group.rank():
        dist.send(total, group=group, group_dst=0)
        dist.recv(total, group=group, group_src=0)
        return total
    received = torch.empty_like(tensor)
    for peer in peers:
        dist.recv(received, group=group, group_src=peer)
        total += received
    for peer in peers:
        dist.send(total, group=group, group_dst=peer)
    return total
