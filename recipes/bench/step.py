"""Measures a step: ours against hand-written loops, on ranks of this machine."""

import torch

from parallel import ParallelConfig
from recipes.bench.loops import fully_shard_loop, our_step, parallelize_module_loop
from recipes.bench.rounds import Comparison, interleave

NOISE = 1.02


def compare_full_shard(num_rounds: int) -> Comparison:
    """Our full_shard step beside the same loop by hand, on every rank.

    Args:
        num_rounds: Rounds.
    """
    torch.set_num_threads(1)
    contenders = {"fully_shard by hand": fully_shard_loop(), "ours, full_shard": our_step(ParallelConfig())}
    times_s = interleave(contenders, num_rounds=num_rounds)
    return Comparison(title="full_shard, 2 ranks", times_s=times_s, targets={"ours, full_shard": NOISE})


def compare_replicated(num_rounds: int) -> Comparison:
    """Our full_shard step beside our replicated one, on every rank.

    Args:
        num_rounds: Rounds.
    """
    torch.set_num_threads(1)
    contenders = {
        "ours, no_shard": our_step(ParallelConfig(strategy="no_shard")),
        "ours, full_shard": our_step(ParallelConfig()),
        "ours, shard_grad_op": our_step(ParallelConfig(strategy="shard_grad_op")),
    }
    times_s = interleave(contenders, num_rounds=num_rounds)
    return Comparison(title="sharded against replicated, 2 ranks", times_s=times_s, targets={"ours, full_shard": 1.15})


def compare_tensor_parallel(num_rounds: int) -> Comparison:
    """Our tp 2 with sequence parallel beside the same loop by hand, on every rank.

    Args:
        num_rounds: Rounds.
    """
    torch.set_num_threads(1)
    contenders = {"parallelize_module by hand": parallelize_module_loop(), "ours, tp": our_step(ParallelConfig(tp=2))}
    times_s = interleave(contenders, num_rounds=num_rounds)
    return Comparison(title="tp 2 with sequence parallel, 2 ranks", times_s=times_s, targets={"ours, tp": NOISE})
