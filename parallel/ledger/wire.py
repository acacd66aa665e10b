"""Turns payloads into bytes that a rank puts on the wire, by a named algorithm."""

from collections.abc import Callable, Mapping
from typing import Literal

from parallel.collective_ops import Kind

WireModel = Literal["ring"]
"""Algorithms of which the bytes are known."""

_RING: Mapping[Kind, Callable[[float, int], float]] = {
    # A reduce-scatter around the ring, then an all-gather: each rank sends all parts but one, twice.
    "all_reduce": lambda payload, ranks: 2 * payload * (ranks - 1) / ranks,
    "all_gather": lambda payload, ranks: payload * (ranks - 1) / ranks,
    "reduce_scatter": lambda payload, ranks: payload * (ranks - 1) / ranks,
    "all_to_all": lambda payload, ranks: payload * (ranks - 1) / ranks,
    "send": lambda payload, ranks: payload,
    "recv": lambda payload, ranks: 0.0,
    # Passed on from rank to rank, the last one passes on nothing: the mean over ranks.
    "broadcast": lambda payload, ranks: payload * (ranks - 1) / ranks,
    "reduce": lambda payload, ranks: payload * (ranks - 1) / ranks,
    "gather": lambda payload, ranks: payload * (ranks - 1) / ranks,
    "scatter": lambda payload, ranks: payload * (ranks - 1) / ranks,
}


def ring_bytes(kind: Kind, payload_bytes: float, ranks: int) -> float:
    """Bytes that a rank of a ring sends for a collective.

    Args:
        kind: What it does.
        payload_bytes: Bytes of its larger side, as `CollectiveCounter` counts them.
        ranks: Ranks of its group.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    return _RING[kind](payload_bytes, ranks)


def central_gather_bytes(payload_bytes: int, ranks: int) -> int:
    """Bytes that cross the link of one rank which gathers from all others and sends the result back to them.

    This is what `DataParallel` does with gradients and parameters; unlike a ring's it grows with the ranks.

    Args:
        payload_bytes: Bytes of the gradients.
        ranks: Ranks, the central one among them.
    """
    return 2 * (ranks - 1) * payload_bytes
