"""Says how long a collective takes over the links that its group crosses."""

from functools import cache
from math import prod

from parallel.collective_ops import Kind
from parallel.config import ParallelConfig
from parallel.ledger.wire import ring_bytes
from parallel.mesh import AXES, VIEWS
from parallel.planner.constants import Constants
from parallel.planner.hardware import Gpu

US = 1e-6
GB = 1e9


class Link:
    """What joins the ranks of a group.

    Attributes:
        ranks: Ranks of the group.
        bytes_per_s: What each of them sends in a second around rings.
        direct_bytes_per_s: What each of them sends in a second to one other, or to all others at once: over its own
            link, which for the slowest is that between nodes.
        hop_s: Time of each step of a ring beside its bytes.
    """

    __slots__ = ("bytes_per_s", "direct_bytes_per_s", "hop_s", "ranks")

    def __init__(self, ranks: int, stride: int, gpu: Gpu, constants: Constants) -> None:
        """Finds the slowest link that a ring through the group crosses.

        A ring that goes through several GPUs of each node leaves the node once, and there are as many rings as GPUs
        in it, each with a network link of its own; so the links of a node add up for one group of all its GPUs, but
        groups that have one GPU in each node have one link each.

        Args:
            ranks: Ranks of the group.
            stride: How far apart they lie among all ranks.
            gpu: Its links.
            constants: The share of a link that is achieved.
        """
        self.ranks = ranks
        self.bytes_per_s, self.direct_bytes_per_s, self.hop_s = _between(
            ranks, stride, gpu.gpus_per_node, *_speeds(gpu, constants)
        )

    def time_s(self, kind: Kind, payload_bytes: float, count: float = 1) -> float:
        """Time of some collectives, one after the other.

        Args:
            kind: What they do.
            payload_bytes: Bytes of the larger side of all of them.
            count: How many they are.
        """
        if self.ranks == 1:
            return 0.0
        speed = self.direct_bytes_per_s if kind == "all_to_all" else self.bytes_per_s
        return ring_bytes(kind, payload_bytes, self.ranks) / speed + self.latency_s(kind, count)

    def latency_s(self, kind: Kind, count: float = 1) -> float:
        """The part of that time which does not depend on bytes.

        Args:
            kind: What the collectives do.
            count: How many they are.
        """
        return count * (self.ranks - 1) * (2 if kind == "all_reduce" else 1) * self.hop_s


def link_of_view(config: ParallelConfig, view: str, gpu: Gpu, constants: Constants) -> Link:
    """What joins the ranks of a view.

    Args:
        config: The layout with every degree resolved.
        view: View of the mesh.
        gpu: Its links.
        constants: The share of a link that is achieved.
    """
    axes = VIEWS[view]
    ranks = prod([getattr(config, axis) for axis in axes])
    stride = prod([getattr(config, axis) for axis in AXES[AXES.index(axes[-1]) + 1 :]])
    return Link(ranks, stride, gpu, constants)


def _speeds(gpu: Gpu, constants: Constants) -> tuple[float, float, float]:
    share = constants.link_share * GB
    return gpu.node_link_gb_per_s * share, gpu.network_link_gb_per_s * share, gpu.hop_latency_us * US


@cache
def _between(
    ranks: int, stride: int, gpus_per_node: int, node: float, network: float, hop_s: float
) -> tuple[float, float, float]:
    """Bytes a second around a ring and directly, and latency of a hop, where ranks of a group lie `stride` apart."""
    if ranks * stride <= gpus_per_node:
        return node, node, hop_s
    members = max(1, gpus_per_node // stride)
    return min(node, network * members), min(node, network), hop_s
