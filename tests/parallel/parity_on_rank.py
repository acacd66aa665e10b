"""What a rank does in the tables of parity, apart from the tables: making those takes each rank seconds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import parallel.compile
from parallel import ParallelConfig
from tests.parallel.small_model import Run, train


def run_on_rank(
    config: ParallelConfig,
    optimizer: Callable[..., Any],
    model: dict[str, Any],
    micro_batches: int,
    max_norm: float | None,
    frozen: Sequence[str],
    by_predicate: bool,
) -> Run:
    """One rank of a case."""
    parallel.compile.BACKEND = "aot_eager"
    return train(
        config,
        optimizer,
        model=model,
        num_micro_batches=micro_batches,
        max_norm=max_norm,
        frozen=frozen,
        units=is_unit if by_predicate else None,
    )


def is_unit(fqn: str, _module: nn.Module) -> bool:
    """The second block alone; the root takes the rest."""
    return fqn == "blocks.1"


def run_halved() -> Run:
    """SGD whose gradients are half as large."""
    return train(ParallelConfig(data_parallel="none"), lambda named: torch.optim.SGD(list(named.values()), lr=0.25))
