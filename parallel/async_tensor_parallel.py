"""Lets compiled blocks overlap the collectives of tensor parallelism with their matmuls."""

from typing import Any

import torch.distributed as dist

from parallel.config import ParallelConfig
from parallel.mesh import Mesh

OPTIONS: dict[str, Any] = {"_micro_pipeline_tp": True}
"""What the compiler is told. Private: torch has no public name for it; test_async_tensor_parallel fails if it goes."""


def check_async_tensor_parallel(config: ParallelConfig, mesh: Mesh) -> None:
    """Refuses what the device cannot do, before anything is changed.

    Args:
        config: The layout.
        mesh: The mesh.

    Raises:
        ValueError: If ranks cannot read each other's memory.
    """
    if not config.async_tp:
        return
    if mesh.device.type != "cuda":
        raise ValueError(
            f"async_tp=True needs GPUs that read each other's memory, but this mesh is on {mesh.device.type}; use "
            "async_tp=False"
        )
    if mesh.crosses_nodes("tp"):
        raise ValueError(
            f"async_tp=True needs GPUs that read each other's memory, but those of tp={config.tp} lie on several nodes;"
            f" use a tp of at most {mesh.ranks_per_node}, or async_tp=False"
        )


def enable_async_tensor_parallel(group: dist.ProcessGroup) -> None:
    """Gives ranks that share matrices memory which each of them can read.

    Args:
        group: These ranks.
    """
    # Private: the compiler asks for groups that were enabled here, and torch has no public call that does.
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group.group_name)
