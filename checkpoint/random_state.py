"""Every rank's random-number generators, as tensors of a checkpoint."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

CPU, CUDA = "rng.cpu", "rng.cuda"
"""Canonical names; a checkpoint holds a row for each rank."""


def capture() -> dict[str, Tensor]:
    """Copies of this rank's generator states under their canonical names.

    Returns:
        uint8 tensors: the CPU generator's, and the current GPU's if one is in use.
    """
    states = {CPU: torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[CUDA] = torch.cuda.get_rng_state()
    return states


def source_rank(rank: int, world_size: int, saved_world_size: int) -> int:
    """The rank whose saved states a rank reads: its own, or 0 where the number of ranks changed."""
    return rank if world_size == saved_world_size else 0


def restore(states: Mapping[str, Tensor], rank: int, world_size: int, saved_world_size: int) -> None:
    """Sets this rank's generators.

    With as many ranks as saved, each goes on with its own sequence. With another number there is no such
    sequence: every rank then seeds its generators with the first 8 bytes of SHA-256 over the saved CPU state of
    rank 0 and its own rank, so that ranks differ and a repeated resume draws the same numbers. A GPU's generator
    for which nothing was saved is seeded the same way.

    Args:
        states: What `source_rank` saved, by canonical name.
        rank: This rank.
        world_size: Ranks now.
        saved_world_size: Ranks that saved.
    """
    same = world_size == saved_world_size
    cpu, cuda = states[CPU], states.get(CUDA)
    # Not torch.manual_seed: it would also reseed generators of devices that are not this rank's.
    if same:
        torch.set_rng_state(cpu)
    else:
        torch.default_generator.manual_seed(_derived_seed(cpu, rank))
    if torch.cuda.is_initialized():
        if same and cuda is not None:
            torch.cuda.set_rng_state(cuda)
        else:
            torch.cuda.manual_seed(_derived_seed(cpu, rank))


def for_other_ranks(state: Tensor, world_size: int) -> Tensor:
    """CPU states of another number of ranks than saved, as `restore` sets them.

    Args:
        state: What rank 0 saved, uint8 [N].
        world_size: Ranks.

    Returns:
        uint8 [world_size, N].
    """
    seeds = (_derived_seed(state, rank) for rank in range(world_size))
    return torch.stack([torch.Generator().manual_seed(seed).get_state() for seed in seeds])


def _derived_seed(state: Tensor, rank: int) -> int:
    content = bytes(state.tolist()) + rank.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)
