"""Meshes, sharding and composition of parallelism; knows tensors and ranks, never a model."""

from parallel.batch import IGNORE_INDEX, Batch
from parallel.config import Buckets, ParallelConfig, Sharding
from parallel.counter import CollectiveCounter
from parallel.data_end import while_all_have_data
from parallel.materialize import materialize
from parallel.mesh import Mesh, build_mesh
from parallel.parallelize import parallelize
from parallel.plan import Block, ModelShape, ParallelPlan, Unit
from parallel.precision import LossScaling, Precision
from parallel.shadowing import warn_of_shadows
from parallel.step import StepResult
from parallel.trained import Trained
from parallel.units import units_by_size, units_where

warn_of_shadows(("models", "checkpoint", "recipes"))

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Block",
    "Buckets",
    "CollectiveCounter",
    "LossScaling",
    "Mesh",
    "ModelShape",
    "ParallelConfig",
    "ParallelPlan",
    "Precision",
    "Sharding",
    "StepResult",
    "Trained",
    "Unit",
    "build_mesh",
    "materialize",
    "parallelize",
    "units_by_size",
    "units_where",
    "while_all_have_data",
]
