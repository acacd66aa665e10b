"""Lets ranks stop together where one runs out of data before the others."""

import warnings
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from parallel.mesh import Mesh

T = TypeVar("T")


def while_all_have_data(batches: Iterable[T], mesh: Mesh) -> Iterator[T]:
    """Yields from an iterable until some rank has nothing left, on every rank as often.

    Each turn is a collective of one number, so every rank iterates, and to its end. Where the ranks do not end at the
    same time what some have left is not used, and a warning says so on each.

    Args:
        batches: This rank's batches, or its lists of micro-batches.
        mesh: Over whose ranks to agree.

    Raises:
        ValueError: On the other ranks, if reading this rank's data raised.
    """
    mine, num_taken = iter(batches), 0
    while True:
        problem: Exception | None = None
        taken: list[T] = []
        try:
            taken = [next(mine)]
        except StopIteration:
            pass
        except Exception as error:
            problem = error
        shared = torch.tensor([len(taken), int(problem is not None)], device=mesh.device)
        dist.all_reduce(shared)
        num_with_data, num_problems = shared.tolist()
        if problem is not None:
            raise problem
        if num_problems:
            raise ValueError(f"{num_problems} other ranks could not read their data; their message says why")
        if num_with_data < mesh.size:
            break
        num_taken += 1
        yield from taken
    if num_with_data:
        warnings.warn(
            f"{mesh.size - num_with_data} of {mesh.size} ranks ran out of data after {num_taken} batches, so all stop "
            f"there; this one {'has more' if taken else 'has no more'}",
            stacklevel=2,
        )
