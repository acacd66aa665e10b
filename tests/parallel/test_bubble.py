"""How long ranks of a pipeline wait for each other, held against theory.

Stages sleep instead of computing, forward for one unit of time and backward for two, so that cores need not be idle.
"""

import time
from collections.abc import Callable
from statistics import mean
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from models.llama.config import LlamaConfig
from parallel import ParallelConfig
from tests.parallel.small_model import batches, build
from tests.ranks import run_ranks

UNIT_S = 0.05
MICRO_BATCHES = 8


class Sleep(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(UNIT_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * UNIT_S)
        return grad


def idle_share(layout: dict[str, Any]) -> float:
    """Share of a step in which this rank computes nothing, of a model with two sleeping blocks a rank."""
    config = ParallelConfig(**layout)
    trained = build(config, LlamaConfig(num_layers=2 * config.pp))
    for fqn, module in trained.source.named_modules():
        if fqn.endswith("feed_forward"):
            module.register_forward_hook(lambda _module, _inputs, output: Sleep.apply(output))
    busy_s = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal busy_s
            start_s = time.perf_counter()
            result = method(*args, **kwargs)
            busy_s += time.perf_counter() - start_s
            return result

        return call

    trained.forward_backward(batches(trained.mesh, 0, MICRO_BATCHES))  # makes the schedule
    with (
        mock.patch.object(PipelineStage, "forward_one_chunk", timed(PipelineStage.forward_one_chunk)),
        mock.patch.object(PipelineStage, "backward_one_chunk", timed(PipelineStage.backward_one_chunk)),
    ):
        dist.barrier()
        start_s = time.perf_counter()
        trained.forward_backward(batches(trained.mesh, 1, MICRO_BATCHES))
        dist.barrier()
        return 1 - busy_s / (time.perf_counter() - start_s)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_the_bubble_is_that_of_theory(schedule: str, pp: int) -> None:
    """Of a step the share (p - 1) / (v m + p - 1) with p ranks, v stages each and m micro-batches.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.
    """
    stages = 2 if schedule == "interleaved_1f1b" else 1
    theory = (pp - 1) / (stages * MICRO_BATCHES + pp - 1)
    measured = mean(run_ranks(pp, idle_share, {"pp": pp, "schedule": schedule}))
    print(f"{schedule} on {pp} ranks: measured {measured:.3f}, theory {theory:.3f}")
    assert theory - 0.02 < measured < theory + 0.08
