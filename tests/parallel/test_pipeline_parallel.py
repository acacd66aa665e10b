"""Stages of a pipeline together compute what one process computes."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from models.llama.config import LlamaConfig
from parallel import ParallelConfig
from tests.parallel.small_model import Run, adamw, batches, build, difference, sgd, whole_parameters
from tests.ranks import run_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v")
TOLERANCE = {adamw: 1e-12, sgd: 1e-13}


def train(config: ParallelConfig, factory: Callable[..., Any], model: dict[str, Any], num_micro_batches: int) -> Run:
    """Five steps with uneven numbers of valid tokens, clipped, and this rank's parameters."""
    trained = build(config, LlamaConfig(**model))
    optimizer = trained.build_optimizer(factory)
    losses, norms = [], []
    for step in range(5):
        losses.append(trained.forward_backward(batches(trained.mesh, step, num_micro_batches)).loss)
        norms.append(trained.clip_gradients(0.05).item())
        optimizer.step()
    losses.append(trained.evaluate(batches(trained.mesh, 7, 2)).loss)
    return Run(losses, norms, whole_parameters(trained))


@cache
def one_process(factory: Callable[..., Any], num_layers: int, tied: bool) -> Run:
    """The numbers to reach."""
    model = {"num_layers": num_layers, "tied_embeddings": tied}
    run: Run = run_ranks(1, train, ParallelConfig(data_parallel="none"), factory, model, 1)[0]
    return run


def assert_parity(
    world_size: int,
    layout: dict[str, Any],
    *,
    factory: Callable[..., Any] = sgd,
    num_layers: int = 4,
    tied: bool = False,
    num_micro_batches: int = 4,
) -> None:
    reference, tolerance = one_process(factory, num_layers, tied), TOLERANCE[factory]
    model = {"num_layers": num_layers, "tied_embeddings": tied}
    runs: list[Run] = run_ranks(world_size, train, ParallelConfig(**layout), factory, model, num_micro_batches)
    held = set().union(*(run.parameters for run in runs))
    assert held == reference.parameters.keys()
    assert all((run.losses, run.norms) == (runs[0].losses, runs[0].norms) for run in runs)
    assert difference(runs[0].losses, reference.losses) < tolerance
    assert difference(runs[0].norms, reference.norms) < tolerance
    for run in runs:
        worst = {fqn: difference(values, reference.parameters[fqn]) for fqn, values in run.parameters.items()}
        assert max(worst.values()) < tolerance, worst


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_schedule_on_two_ranks_equals_one_process(schedule: str, tied: bool) -> None:
    assert_parity(2, {"pp": 2, "schedule": schedule}, tied=tied)
