"""How long ranks of a pipeline wait for each other, held against theory.

Stages sleep instead of computing, so that cores need not be idle: one unit of time forward, one backward for gradients
of inputs, and one for those of weights.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import mean
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from models.llama.config import LlamaConfig
from parallel import ParallelConfig
from parallel.schedules import traits_of
from tests.parallel.small_model import batches, build
from tests.ranks import run_ranks

UNIT_S = 0.05
MICRO_BATCHES = 8


class Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(UNIT_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(UNIT_S)
        return grad


class SleepBackward(torch.autograd.Function):
    """The identity, whose gradient takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(UNIT_S)
        return grad


def make_sleepy(block: nn.Module) -> None:
    """Lets a block take its time."""
    down_proj = block.get_submodule("feed_forward.down_proj")

    def forward(x: Tensor) -> Tensor:
        weight = SleepBackward.apply(down_proj.get_parameter("weight"))
        slept: Tensor = Sleep.apply(F.linear(x, weight))
        return slept

    down_proj.forward = forward


CHUNKS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def idle_share(layout: dict[str, Any]) -> tuple[float, float | None]:
    """Share of a step in which this rank computes nothing, of a model with two sleeping blocks a rank.

    Returns:
        The share that was measured; and what follows from the order in which ranks work, where backward comes in two.
    """
    config = ParallelConfig(**layout)
    trained = build(config, LlamaConfig(num_layers=2 * config.pp))
    for fqn, module in trained.source.named_modules():
        if any(fqn == block.fqn for block in trained.plan.blocks):
            make_sleepy(module)
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
    with ExitStack() as stack:
        for name in CHUNKS:
            stack.enter_context(mock.patch.object(PipelineStage, name, timed(getattr(PipelineStage, name))))
        dist.barrier()
        start_s = time.perf_counter()
        trained.forward_backward(batches(trained.mesh, 1, MICRO_BATCHES))
        dist.barrier()
        measured = 1 - busy_s / (time.perf_counter() - start_s)
    if not traits_of(config).splits_backward:
        return measured, None
    assert trained.pipeline and trained.pipeline._prepared
    return measured, simulated(trained.pipeline._prepared[1].pipeline_order, config.pp)


def simulated(order: dict[int, list[Any]], pp: int) -> float:
    """Share of a step in which ranks idle that work in an order, each action as soon as what it needs is there."""
    num_stages = 1 + max(each.stage_index for row in order.values() for each in flat(row))
    ends: dict[tuple[int, str, int], float] = {}
    clocks, queues = dict.fromkeys(order, 0.0), {rank: list(flat(row)) for rank, row in order.items()}
    while any(queues.values()):
        before = len(ends)
        for rank, queue in queues.items():
            while queue:
                stage, kind, micro_batch = (
                    queue[0].stage_index,
                    queue[0].computation_type.value,
                    queue[0].microbatch_index,
                )
                needed = [(stage, "I", micro_batch)] if kind == "W" else [(stage, "F", micro_batch)]
                if kind == "F":
                    needed = [(stage - 1, "F", micro_batch)] if stage else []
                elif kind in "BI" and stage < num_stages - 1:
                    needed.append((stage + 1, "I", micro_batch))
                if not all(each in ends for each in needed):
                    break
                start = max([clocks[rank], *(ends[each] for each in needed)])
                clocks[rank] = start + (2 if kind == "B" else 1)
                # Gradients of inputs go on once a whole backward has ended.
                ends[stage, "I" if kind == "B" else kind, micro_batch] = clocks[rank]
                queue.pop(0)
        assert len(ends) > before, queues
    work = sum(2 if each.computation_type.value == "B" else 1 for row in order.values() for each in flat(row))
    return 1 - work / (pp * max(clocks.values()))


def flat(row: list[Any]) -> Iterator[Any]:
    """What a rank computes; actions that may overlap one after the other."""
    for action in row:
        for each in () if action is None else action.sub_actions or (action,):
            if each.computation_type.value in "FBIW":
                yield each


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_the_bubble_is_that_of_theory(schedule: str, pp: int) -> None:
    """Of a step the share (p - 1) / (v m + p - 1) with p ranks, v stages each and m micro-batches.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.
    """
    stages = 2 if schedule == "interleaved_1f1b" else 1
    theory = (pp - 1) / (stages * MICRO_BATCHES + pp - 1)
    measured = mean(share for share, _ in run_ranks(pp, idle_share, {"pp": pp, "schedule": schedule}))
    print(f"{schedule} on {pp} ranks: measured {measured:.3f}, theory {theory:.3f}")
    assert theory - 0.02 < measured < theory + 0.08


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v"])
def test_gradients_of_weights_fill_the_bubble_as_the_order_of_work_says(schedule: str, pp: int) -> None:
    """A third of what two stages a rank leave with whole backwards, where all three kinds of work take as long.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
    """
    runs = run_ranks(pp, idle_share, {"pp": pp, "schedule": schedule})
    measured, theory = mean(share for share, _ in runs), runs[0][1]
    print(f"{schedule} on {pp} ranks: measured {measured:.3f}, theory {theory:.3f}")
    assert theory == pytest.approx((pp - 1) / (6 * MICRO_BATCHES + pp - 1), rel=1e-6)
    assert theory - 0.02 < measured < theory + 0.08
