"""Builds a recipe at its full world size in one process, without memory for values or a second rank."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from parallel import build_mesh
from parallel.materialize import allocate
from parallel.replicas import local_part
from parallel.traits import TRAITS
from recipes.model import build_model
from recipes.recipe import Recipe
from recipes.without_values import modes_without_values


class Shard(NamedTuple):
    """What one rank holds of a parameter.

    Attributes:
        shape: Size of the whole parameter per dim.
        local_shape: Size of the rank's part.
        dtype: Type in which it is stored.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the rank's part."""
        return torch.Size(self.local_shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What building a recipe shows of one rank.

    Attributes:
        mesh: The layout in a few words.
        coordinates: Place of the rank along each view of the mesh.
        shards: What it holds of each parameter, by fqn, tied ones once.
    """

    mesh: str
    coordinates: Mapping[str, int]
    shards: Mapping[str, Shard]

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, with pp of what the rank has of it; tied ones once."""
        return sum(torch.Size(each.shape).numel() for each in self.shards.values())

    @property
    def parameter_bytes(self) -> int:
        """Bytes that the rank holds for parameters."""
        return sum(each.num_bytes for each in self.shards.values())


def dry_run(recipe: Recipe, world_size: int, rank: int = 0) -> DryRun:
    """Builds the model of a recipe as one rank of many would; all that a layout refuses is refused here.

    Args:
        recipe: What to train and how to split it.
        world_size: Ranks of the job.
        rank: The rank to be.

    Raises:
        ValueError: If the recipe does not fit that many ranks, the rank is none of them, or this process is a rank
            of a job already.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must be from 0 to {world_size - 1}, as the world has {world_size} ranks")
    recipe.check_layout(world_size)
    with fake_world(world_size, rank):
        mesh = build_mesh(recipe.parallel, "cpu")
        trained = build_model(recipe, mesh)
        if TRAITS[recipe.parallel.data_parallel].flattens:
            # It is cut when it is wrapped, which takes parameters that claim to have values.
            with modes_without_values()():
                allocate(trained, clear=False)
        views = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        return DryRun(
            mesh=mesh.describe(),
            coordinates={view: mesh.coordinate(view) for view in views},
            shards={
                fqn: Shard(
                    tuple(trained.backend.whole_shape(fqn, parameter)),
                    tuple(local_part(parameter).shape),
                    parameter.dtype,
                )
                for fqn, parameter in trained.named_parameters().items()
            },
        )


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """A default process group of many ranks, of which there is this one; its collectives send nothing.

    Args:
        world_size: Ranks that it claims to have.
        rank: The one that this process is.

    Raises:
        ValueError: If there is a default process group.
    """
    # Not at the top: only this needs it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("a dry run starts a process group of its own, but this process has one; call it before")
    # What a launcher says is true of another job.
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "8"}):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
