"""Asks the rules of `parallel` itself whether a layout of a model would be accepted."""

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from parallel.block_rules import check_ops, sees_whole_blocks
from parallel.config import ParallelConfig, Schedule
from parallel.float8 import check_whole_matrices
from parallel.layout import check_layout, check_sequence_length
from parallel.parallelize import BACKENDS
from parallel.plan import ModelShape, ParallelPlan
from parallel.schedules import check_micro_batches


def is_legal_layout(config: ParallelConfig, shape: ModelShape, sequence_length: int, device: str = "cuda") -> bool:
    """Whether `parallelize` takes a layout of a model that declares all that the layout asks for.

    Args:
        config: The layout with every degree resolved.
        shape: The model's counts and widths.
        sequence_length: Tokens of a sequence.
        device: Type of the device that it will run on.
    """

    def check() -> None:
        check_layout(config, shape)
        check_sequence_length(config, sequence_length, shape)
        _check_backend(config, shape, device)
        check_whole_matrices(config)
        check_ops(config, has_experts=shape.num_experts > 0)

    within_blocks = config.sharding.units == "size" and sees_whole_blocks(config, config.activation_checkpointing)
    return not within_blocks and is_legal(check)


def is_legal(check: Callable[[], None]) -> bool:
    """Whether a check passes.

    Args:
        check: Raises ValueError where it does not.
    """
    try:
        check()
    except ValueError:
        return False
    return True


@lru_cache(maxsize=65536)
def runs(schedule: Schedule, pp: int, num_micro_batches: int) -> bool:
    """Whether a schedule can run so many micro-batches.

    Args:
        schedule: Of the pipeline.
        pp: Its ranks.
        num_micro_batches: Of a step on each rank.
    """
    config = ParallelConfig(dp_shard=1, pp=pp, schedule=schedule)
    return is_legal(lambda: check_micro_batches(config, num_micro_batches))


def _check_backend(config: ParallelConfig, shape: ModelShape, device: str) -> None:
    """Asks the backend, to which a mesh is no more here than its degrees and the type of its device."""
    degrees = {"fsdp": config.dp_shard * config.cp, "loss": config.dp_replicate * config.dp_shard * config.cp}
    mesh: Any = SimpleNamespace(
        device=torch.device(device), degree=lambda view: degrees.get(view) or getattr(config, view), config=config
    )
    # There is no model whose parameters had names; backends ask no more than whether some are tied.
    tied = (("tied_embeddings",),) if shape.tied_embeddings else ()
    BACKENDS[config.data_parallel]().check(mesh, config, ParallelPlan(shape=shape, tied=tied))
