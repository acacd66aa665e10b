"""Turns a ParallelConfig into one DeviceMesh with every named view of it."""

import os
import warnings
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.config import ParallelConfig
from parallel.layout import resolve
from parallel.traits import TRAITS

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes from the outermost, whose neighbours may be on other nodes, to the innermost."""

VIEWS = {
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "fsdp": ("dp_shard", "cp"),
    "tp": ("tp",),
    "dp_shard": ("dp_shard",),
    "cp": ("cp",),
    "dp": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}
"""The axes that each view spans."""

EXPERT_VIEWS = ("expert_fsdp", "ep")
"""What `fsdp` is carved into: neighbours along it share the experts (`ep`), each of which is sharded over the rest."""

PARAMETER_VIEWS = ("pp", "dp_replicate", "fsdp", "tp")
"""Dims of the DeviceMesh on which parameters live; together they span every axis."""


class Mesh:
    """The ranks of a job, arranged by axis, and a DeviceMesh for each view of them.

    Attributes:
        config: The layout with every degree resolved.
        device: This rank's device.
        parameters: DeviceMesh with the dims `PARAMETER_VIEWS`, on slices of which parameters are placed.
        hybrid: Its two dims dp_replicate x fsdp, for hybrid sharding.
        experts: DeviceMesh of the same groups with `EXPERT_VIEWS` in the place of fsdp, for parameters of experts; None
            where ep is 1.
        ranks_per_node: Ranks that share a node.
    """

    def __init__(self, config: ParallelConfig, device: torch.device, ranks_per_node: int) -> None:
        """Builds every process group; all ranks of the job call this together.

        Args:
            config: Layout with every degree resolved.
            device: This rank's device.
            ranks_per_node: Ranks that share a node, consecutive.
        """
        self.config, self.device, self.ranks_per_node = config, device, ranks_per_node
        self._rank = dist.get_rank()
        self._ranks = torch.arange(dist.get_world_size()).view([getattr(config, axis) for axis in AXES])
        # Once: counters ask for each collective, where a search among thousands of ranks would take most of the time.
        self._own = {
            view: next(group for group in self.all_groups(view) if self._rank in group)
            for view in (*VIEWS, *EXPERT_VIEWS)
        }
        shape = [self.degree(view) for view in PARAMETER_VIEWS]
        self.parameters = DeviceMesh(device.type, self._ranks.view(shape), mesh_dim_names=PARAMETER_VIEWS)
        self.hybrid = self.parameters["dp_replicate", "fsdp"]
        self._views: dict[str, DeviceMesh] = {name: self.parameters[name] for name in PARAMETER_VIEWS}
        for name in (*VIEWS, *EXPERT_VIEWS):
            if name not in self._views:
                self._views[name] = self._find_twin(name) or self._new_view(name)
        self.experts = self._experts() if config.ep > 1 else None

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self._ranks.numel()

    def __getitem__(self, view: str) -> DeviceMesh:
        """The 1-D DeviceMesh of a view.

        Raises:
            KeyError: If there is no such view.
        """
        _axes_of(view)
        return self._views[view]

    def degree(self, view: str) -> int:
        """Ranks along a view."""
        ranks = prod(getattr(self.config, axis) for axis in _axes_of(view))
        return {"ep": self.config.ep, "expert_fsdp": ranks // self.config.ep}.get(view, ranks)

    def coordinate(self, view: str) -> int:
        """This rank's place along a view, from 0."""
        return self.ranks(view).index(self._rank)

    def ranks(self, view: str) -> list[int]:
        """Global ranks that share this rank's group of a view, in the order of their coordinates."""
        _axes_of(view)
        return list(self._own[view])

    def group(self, view: str) -> dist.ProcessGroup:
        """This rank's process group of a view."""
        return self[view].get_group()

    def all_groups(self, view: str) -> list[list[int]]:
        """The global ranks of every group of a view; together they hold each rank once."""
        ep = self.config.ep
        if view == "ep":
            return [
                group[start : start + ep] for group in self.all_groups("fsdp") for start in range(0, len(group), ep)
            ]
        if view == "expert_fsdp":
            return [group[start::ep] for group in self.all_groups("fsdp") for start in range(ep)]
        along = [AXES.index(axis) for axis in _axes_of(view)]
        across = [dim for dim in range(len(AXES)) if dim not in along]
        groups: list[list[int]] = self._ranks.permute(across + along).reshape(-1, self.degree(view)).tolist()
        return groups

    def view_of(self, ranks: list[int]) -> str:
        """Name of the view whose group holds exactly these ranks; `world` or `other` where none does."""
        ordered = sorted(ranks)
        names = [name for name, own in self._own.items() if sorted(own) == ordered]
        return names[0] if names else ("world" if len(ranks) == self.size else "other")

    def describe(self) -> str:
        """The layout in a few words, such as `fsdp2 full_shard, dp_shard 2 x tp 2`."""
        degrees = [f"{axis} {getattr(self.config, axis)}" for axis in (*AXES, "ep") if getattr(self.config, axis) > 1]
        backend = self.config.data_parallel
        strategy = f" {self.config.resolved_strategy}" if TRAITS[backend].shards else ""
        return f"{backend}{strategy}, {' x '.join(degrees) or '1 rank'}"

    def crosses_nodes(self, view: str) -> bool:
        """Whether a group of this view spans more than one node."""
        return any(len({rank // self.ranks_per_node for rank in group}) > 1 for group in self.all_groups(view))

    def _find_twin(self, name: str) -> DeviceMesh | None:
        """A view that holds the same ranks, so that no second group is built for them."""
        twins = (view for view in self._views if self.all_groups(view) == self.all_groups(name))
        return next((self._views[view] for view in twins), None)

    def _new_view(self, name: str) -> DeviceMesh:
        group, _ = dist.new_subgroups_by_enumeration(self.all_groups(name))
        return DeviceMesh.from_group(group, self.device.type, mesh_dim_names=(name,))

    def _experts(self) -> DeviceMesh:
        names = tuple(name for view in PARAMETER_VIEWS for name in (EXPERT_VIEWS if view == "fsdp" else (view,)))
        shape = [self.degree(name) for name in names]
        groups = [self.group(name) for name in names]
        return DeviceMesh.from_group(groups, self.device.type, mesh=self._ranks.view(shape), mesh_dim_names=names)


def _axes_of(view: str) -> tuple[str, ...]:
    """The axes that a view spans; of those that fsdp is carved into, the ones that they are within."""
    if view not in VIEWS and view not in EXPERT_VIEWS:
        raise KeyError(f"no view {view!r}; legal: {', '.join((*VIEWS, *EXPERT_VIEWS))}")
    return VIEWS.get(view, VIEWS["fsdp"])


def build_mesh(config: ParallelConfig, device_type: str | None = None) -> Mesh:
    """Arranges the ranks of the job, starting the default process group where there is none.

    The world is the one that the launcher's environment names (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`,
    `MASTER_PORT`); without that environment it is this one process.

    Args:
        config: The layout.
        device_type: `cuda` or `cpu`; None takes cuda where there is a GPU.

    Returns:
        The mesh, the same on every rank.

    Raises:
        ValueError: If the layout does not fit the world; raised before any group starts.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    started = dist.is_initialized()
    world_size = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))
    resolved = resolve(config, world_size)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = _own_gpu(world_size)
        torch.cuda.set_device(device)
    if not started:
        _start_default_group(device, world_size)
    mesh = Mesh(resolved, device, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if resolved.tp > 1 and mesh.crosses_nodes("tp"):
        warnings.warn(
            f"tp={resolved.tp} crosses nodes of {mesh.ranks_per_node} ranks; its traffic is per layer and will be slow",
            stacklevel=2,
        )
    return mesh


def _own_gpu(world_size: int) -> torch.device:
    if "LOCAL_RANK" not in os.environ and world_size > 1:
        raise ValueError(
            f"the job has {world_size} ranks, but LOCAL_RANK does not say which GPU of its node this one has; start "
            "the script through torchrun, or set LOCAL_RANK"
        )
    # Some launchers show each rank its own GPU only, as number 0.
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _start_default_group(device: torch.device, world_size: int) -> None:
    # Beside GPUs gloo serves tensors in host memory: objects, and parameters that are offloaded.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(
            backend,
            store=_store_of_attempt(),
            rank=int(os.environ["RANK"]),
            world_size=world_size,
            device_id=device if device.type == "cuda" else None,
        )
    elif world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        raise ValueError(f"WORLD_SIZE={world_size} is set but RANK is not; start the script through torchrun")


def _store_of_attempt() -> dist.Store | None:
    """Where ranks that torchrun has started again find each other; None: where torch looks by itself.

    The agent of torchrun keeps one store over all restarts, in which ranks would find the addresses of dead ones.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Agents of several nodes count restarts each for itself.
    if not shared or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return None
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
