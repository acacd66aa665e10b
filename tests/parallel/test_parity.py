"""Every composition gives the numbers of one process."""

from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
import torch

from parallel import ParallelConfig
from tests.parallel.small_model import Run, adamw, difference, sgd, train
from tests.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "full_shard-1": (1, {}),
    "full_shard-2": (2, {}),
    "full_shard-3": (3, {}),
    "full_shard-4": (4, {}),
    "shard_grad_op-2": (2, {"strategy": "shard_grad_op"}),
    "hybrid_shard-2x2": (4, {"strategy": "hybrid_shard", "dp_replicate": 2}),
    "hybrid_shard_zero2-2x2": (4, {"strategy": "hybrid_shard_zero2", "dp_replicate": 2}),
    "tp-2": (2, {"tp": 2}),
    "tp-4": (4, {"tp": 4}),
    "full_shard-2 x tp-2": (4, {"tp": 2}),
    "hybrid_shard-2x2 x tp-2": (8, {"strategy": "hybrid_shard", "dp_replicate": 2, "tp": 2}),
}
MODELS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head": {"num_kv_heads": 8},
    "tied": {"tied_embeddings": True},
    "bias and q/k norm": {"attention_bias": True, "qk_norm": True, "num_kv_heads": 4},
}
SPLITS: dict[str, dict[str, Any]] = {
    "sequence+loss": {"sequence_parallel": True, "loss_parallel": True},
    "sequence": {"sequence_parallel": True, "loss_parallel": False},
    "loss": {"sequence_parallel": False, "loss_parallel": True},
    "neither": {"sequence_parallel": False, "loss_parallel": False},
}
# Micro-batches, and when gradients are reduced.
ACCUMULATION: dict[str, tuple[int, Any]] = {
    "one": (1, "every_micro_batch"),
    "three, reduced each": (3, "every_micro_batch"),
    "three, reduced last": (3, "last"),
}
CLIPPING = {"clipped": 0.05, "unclipped": None}
OPTIMIZERS: dict[str, tuple[Callable[..., Any], float]] = {"adamw": (adamw, 1e-12), "sgd": (sgd, 1e-13)}


class Case(NamedTuple):
    """One row of the table."""

    layout: str
    model: str
    split: str
    accumulation: str
    clipping: str
    optimizer: str


FACTORS = (LAYOUTS, MODELS, SPLITS, ACCUMULATION, CLIPPING, OPTIMIZERS)

TABLE = (
    Case("full_shard-1", "bias and q/k norm", "sequence+loss", "three, reduced last", "unclipped", "sgd"),
    Case("full_shard-1", "grouped-query", "sequence+loss", "three, reduced each", "clipped", "adamw"),
    Case("full_shard-1", "multi-head", "sequence+loss", "one", "clipped", "sgd"),
    Case("full_shard-1", "tied", "sequence+loss", "one", "unclipped", "sgd"),
    Case("full_shard-2", "bias and q/k norm", "sequence+loss", "three, reduced last", "clipped", "adamw"),
    Case("full_shard-2", "grouped-query", "sequence+loss", "three, reduced last", "unclipped", "sgd"),
    Case("full_shard-2", "multi-head", "sequence+loss", "three, reduced each", "clipped", "adamw"),
    Case("full_shard-2", "tied", "sequence+loss", "one", "clipped", "sgd"),
    Case("full_shard-3", "bias and q/k norm", "sequence+loss", "three, reduced each", "clipped", "sgd"),
    Case("full_shard-3", "grouped-query", "sequence+loss", "one", "unclipped", "adamw"),
    Case("full_shard-3", "multi-head", "sequence+loss", "three, reduced last", "clipped", "sgd"),
    Case("full_shard-3", "tied", "sequence+loss", "one", "unclipped", "adamw"),
    Case("full_shard-4", "bias and q/k norm", "sequence+loss", "one", "clipped", "sgd"),
    Case("full_shard-4", "grouped-query", "sequence+loss", "three, reduced each", "unclipped", "adamw"),
    Case("full_shard-4", "multi-head", "sequence+loss", "three, reduced last", "unclipped", "adamw"),
    Case("full_shard-4", "tied", "sequence+loss", "three, reduced last", "clipped", "sgd"),
    Case("shard_grad_op-2", "bias and q/k norm", "sequence+loss", "three, reduced each", "unclipped", "sgd"),
    Case("shard_grad_op-2", "grouped-query", "sequence+loss", "one", "clipped", "adamw"),
    Case("shard_grad_op-2", "multi-head", "sequence+loss", "three, reduced last", "unclipped", "sgd"),
    Case("shard_grad_op-2", "tied", "sequence+loss", "one", "clipped", "adamw"),
    Case("hybrid_shard-2x2", "bias and q/k norm", "sequence+loss", "three, reduced last", "unclipped", "sgd"),
    Case("hybrid_shard-2x2", "grouped-query", "sequence+loss", "one", "unclipped", "sgd"),
    Case("hybrid_shard-2x2", "multi-head", "sequence+loss", "three, reduced each", "clipped", "sgd"),
    Case("hybrid_shard-2x2", "tied", "sequence+loss", "three, reduced each", "clipped", "adamw"),
    Case("hybrid_shard_zero2-2x2", "bias and q/k norm", "sequence+loss", "three, reduced each", "clipped", "sgd"),
    Case("hybrid_shard_zero2-2x2", "grouped-query", "sequence+loss", "three, reduced each", "clipped", "sgd"),
    Case("hybrid_shard_zero2-2x2", "multi-head", "sequence+loss", "one", "unclipped", "adamw"),
    Case("hybrid_shard_zero2-2x2", "tied", "sequence+loss", "three, reduced last", "clipped", "sgd"),
    Case("tp-2", "bias and q/k norm", "sequence+loss", "three, reduced last", "clipped", "adamw"),
    Case("tp-2", "grouped-query", "sequence", "three, reduced each", "unclipped", "sgd"),
    Case("tp-2", "multi-head", "loss", "three, reduced last", "clipped", "adamw"),
    Case("tp-2", "tied", "neither", "one", "unclipped", "adamw"),
    Case("tp-4", "bias and q/k norm", "sequence", "three, reduced each", "clipped", "adamw"),
    Case("tp-4", "grouped-query", "loss", "one", "clipped", "sgd"),
    Case("tp-4", "multi-head", "neither", "three, reduced last", "unclipped", "adamw"),
    Case("tp-4", "tied", "sequence+loss", "one", "clipped", "sgd"),
    Case("full_shard-2 x tp-2", "bias and q/k norm", "neither", "one", "clipped", "sgd"),
    Case("full_shard-2 x tp-2", "grouped-query", "sequence+loss", "three, reduced each", "clipped", "adamw"),
    Case("full_shard-2 x tp-2", "multi-head", "loss", "three, reduced each", "unclipped", "sgd"),
    Case("full_shard-2 x tp-2", "multi-head", "sequence", "three, reduced last", "clipped", "adamw"),
    Case("full_shard-2 x tp-2", "tied", "loss", "three, reduced each", "clipped", "sgd"),
    Case("hybrid_shard-2x2 x tp-2", "bias and q/k norm", "loss", "three, reduced last", "unclipped", "adamw"),
    Case("hybrid_shard-2x2 x tp-2", "grouped-query", "neither", "three, reduced each", "clipped", "adamw"),
    Case("hybrid_shard-2x2 x tp-2", "multi-head", "sequence+loss", "three, reduced last", "unclipped", "sgd"),
    Case("hybrid_shard-2x2 x tp-2", "tied", "sequence", "one", "unclipped", "sgd"),
)


def is_meaningful(case: Case) -> bool:
    """Without tensor parallelism there is nothing to split, so one way of splitting stands for all."""
    return "tp" in case.layout or case.split == "sequence+loss"


def pairs(case: Case) -> set[tuple[tuple[int, str], ...]]:
    """Every two choices of a case that stand together."""
    return set(combinations(enumerate(case), 2))


def test_the_table_covers_every_pair_of_choices() -> None:
    possible = [Case(*choice) for choice in product(*FACTORS)]
    wanted = set().union(*(pairs(case) for case in possible if is_meaningful(case)))
    covered = set().union(*map(pairs, TABLE))
    assert wanted <= covered, sorted(wanted - covered)


@cache
def one_process(model: str, accumulation: str, clipping: str, optimizer: str) -> Run:
    """The numbers to reach: one process, the global batch in one piece."""
    return run_case(1, {"data_parallel": "none"}, Case("", model, "sequence+loss", "one", clipping, optimizer))


def run_case(world_size: int, layout: dict[str, Any], case: Case) -> Run:
    """Trains five steps and makes sure that all ranks saw the same numbers."""
    num_micro_batches, reduce = ACCUMULATION[case.accumulation]
    config = ParallelConfig(**layout, **SPLITS[case.split], reduce_gradients=reduce)
    runs: list[Run] = run_ranks(
        world_size,
        run_on_rank,
        config,
        OPTIMIZERS[case.optimizer][0],
        MODELS[case.model],
        num_micro_batches,
        CLIPPING[case.clipping],
    )
    assert all((run.losses, run.norms) == (runs[0].losses, runs[0].norms) for run in runs)
    return runs[0]


def run_on_rank(
    config: ParallelConfig, optimizer: Callable[..., Any], model: dict[str, Any], micro_batches: int, max_norm: float
) -> Run:
    """One rank of a case."""
    return train(config, optimizer, model=model, num_micro_batches=micro_batches, max_norm=max_norm)


@pytest.mark.parametrize("case", TABLE, ids=["/".join(case) for case in TABLE])
def test_five_steps_equal_one_process(case: Case) -> None:
    run = run_case(*LAYOUTS[case.layout], case)
    reference = one_process(case.model, "one", case.clipping, case.optimizer)
    tolerance = OPTIMIZERS[case.optimizer][1]
    assert difference(torch.tensor(run.losses), torch.tensor(reference.losses)) < tolerance
    assert difference(torch.tensor(run.norms), torch.tensor(reference.norms)) < tolerance
    assert run.parameters.keys() == reference.parameters.keys()
    worst = {fqn: difference(run.parameters[fqn], reference.parameters[fqn]) for fqn in reference.parameters}
    assert max(worst.values()) < tolerance, worst


def test_a_wrong_scale_of_gradients_would_fail_the_table() -> None:
    """A control: averaging over two ranks, the classic fault, is far outside the tolerance."""
    case = Case("", "grouped-query", "sequence+loss", "one", "unclipped", "sgd")
    reference = one_process(*case[1:2], *case[3:])
    halved: Run = run_ranks(1, run_halved)[0]
    assert difference(halved.parameters["head.weight"], reference.parameters["head.weight"]) > 1e-6


def run_halved() -> Run:
    """SGD whose gradients are half as large."""
    return train(ParallelConfig(data_parallel="none"), lambda named: torch.optim.SGD(list(named.values()), lr=0.25))
