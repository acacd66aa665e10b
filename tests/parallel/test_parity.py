"""Every composition gives the numbers of one process."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest

from parallel import Buckets, ParallelConfig, Sharding
from tests.covering import Row, all_pairs, covering_rows, pairs
from tests.parallel.parity_on_rank import run_halved, run_on_rank
from tests.parallel.small_model import Run, adamw, difference, fused_adamw, sgd
from tests.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "full_shard-1": (1, {}),
    "full_shard-2": (2, {}),
    "full_shard-3": (3, {}),
    "full_shard-4": (4, {}),
    "shard_grad_op-2": (2, {"strategy": "shard_grad_op"}),
    "no_shard-2": (2, {"strategy": "no_shard"}),
    "ddp-2": (2, {"data_parallel": "ddp"}),
    "ddp-3": (3, {"data_parallel": "ddp", "buckets": Buckets(bucket_cap_mb=0.1)}),
    "ddp-2 x tp-2": (4, {"data_parallel": "ddp", "tp": 2}),
    "zero1-2": (2, {"data_parallel": "zero1"}),
    "zero1-3": (3, {"data_parallel": "zero1"}),
    "hybrid_shard-2x2": (4, {"strategy": "hybrid_shard", "dp_replicate": 2}),
    "hybrid_shard_zero2-2x2": (4, {"strategy": "hybrid_shard_zero2", "dp_replicate": 2}),
    "fsdp1 full_shard-2": (2, {"data_parallel": "fsdp1"}),
    "fsdp1 full_shard-3": (3, {"data_parallel": "fsdp1"}),
    "fsdp1 shard_grad_op-2": (2, {"data_parallel": "fsdp1", "strategy": "shard_grad_op"}),
    "fsdp1 no_shard-2": (2, {"data_parallel": "fsdp1", "strategy": "no_shard"}),
    "fsdp1 hybrid_shard-2x2": (4, {"data_parallel": "fsdp1", "strategy": "hybrid_shard", "dp_replicate": 2}),
    "fsdp1 hybrid_shard_zero2-2x2": (
        4,
        {"data_parallel": "fsdp1", "strategy": "hybrid_shard_zero2", "dp_replicate": 2},
    ),
    "fsdp1 full_shard-2 x tp-2": (4, {"data_parallel": "fsdp1", "tp": 2}),
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
SHARDING: dict[str, Sharding] = {
    "by block": Sharding(),
    "by size, prefetched": Sharding(units="size", unit_min_parameters=5000, forward_prefetch=2, backward_prefetch=2),
    "by size, prefetched by one": Sharding(
        units="size", unit_min_parameters=5000, forward_prefetch=1, backward_prefetch=1, limit_all_gathers=False
    ),
    "whole": Sharding(units="model"),
    "whole and offloaded": Sharding(units="model", cpu_offload=True),
    "by predicate": Sharding(),
    "last unit kept": Sharding(keep_last_unit=True),
    "regrouped": Sharding(reshard_group=2),
}
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "nothing recomputed": {},
    "all recomputed": {"activation_checkpointing": "full"},
    "every second block": {"activation_checkpointing": "full", "activation_checkpoint_every": 2},
    "some ops recomputed": {"activation_checkpointing": "selective"},
}
# Micro-batches, and when gradients are reduced.
ACCUMULATION: dict[str, tuple[int, Any]] = {
    "one": (1, None),
    "three, reduced each": (3, "every_micro_batch"),
    "three, reduced last": (3, "last"),
}
CLIPPING = {"clipped": 0.05, "unclipped": None}
OPTIMIZERS: dict[str, tuple[Callable[..., Any], float]] = {
    "adamw": (adamw, 1e-12),
    "fused adamw": (fused_adamw, 1e-12),
    "sgd": (sgd, 1e-13),
}
FROZEN: dict[str, tuple[str, ...]] = {
    "all trained": (),
    "some frozen": ("embed.weight", "blocks.0.attention.q_proj.weight", "blocks.1.feed_forward_norm.weight"),
}
# Compiled code for the arithmetic itself is in test_compile: here the graphs run as they are, which takes seconds less.
COMPILE: dict[str, bool] = {"not compiled": False, "compiled": True}
COMPILED_LAYOUTS = ("full_shard-2", "tp-2", "full_shard-2 x tp-2", "ddp-2", "fsdp1 full_shard-2")
ONLY_FSDP2 = ("by size, prefetched", "whole and offloaded", "regrouped")
ONLY_FSDP1 = ("by size, prefetched by one", "whole")


class Case(NamedTuple):
    """One row of the table."""

    layout: str
    model: str
    split: str
    sharding: str
    checkpointing: str
    accumulation: str
    clipping: str
    optimizer: str
    frozen: str
    compiled: str


FACTORS = [
    list(each)
    for each in (LAYOUTS, MODELS, SPLITS, SHARDING, CHECKPOINTING, ACCUMULATION, CLIPPING, OPTIMIZERS, FROZEN, COMPILE)
]


def is_meaningful(row: Row) -> bool:
    """Leaves out what is refused, and what says nothing: without tensor parallelism there is nothing to split."""
    case = Case(*row)
    if "tp" not in case.layout and case.split != "sequence+loss":
        return False
    if case.layout.startswith(("ddp", "zero1")) and (
        case.sharding != "by block" or case.accumulation == "three, reduced each"
    ):
        return False  # nothing is sharded, and gradients are whole anyway
    is_fsdp1 = case.layout.startswith("fsdp1")
    if case.sharding in (ONLY_FSDP2 if is_fsdp1 else ONLY_FSDP1):
        return False  # refused, or a way that the other generation has another row for
    if is_fsdp1 and (
        ("tp" in case.layout and (case.model == "tied" or case.accumulation == "three, reduced last"))
        or ("no_shard" in case.layout and case.accumulation == "three, reduced each")
    ):
        return False
    is_compiled = COMPILE[case.compiled]
    if is_compiled and case.layout not in COMPILED_LAYOUTS:
        return False
    if case.sharding.startswith("by size") and (is_compiled or case.checkpointing == "some ops recomputed"):
        return False  # units within blocks
    return case.sharding != "regrouped" or case.layout == "full_shard-4"


COSTLY = [Case._fields.index(name) for name in ("compiled", "accumulation", "checkpointing")]
TABLE = [Case(*row) for row in covering_rows(FACTORS, is_meaningful, COSTLY)]


def test_the_table_covers_every_pair_of_choices() -> None:
    covered = set().union(*map(pairs, TABLE))
    wanted = all_pairs(FACTORS, is_meaningful)
    assert wanted <= covered, sorted(wanted - covered)
    assert {each for pair in wanted for each in pair} == {
        (number, name) for number, names in enumerate(FACTORS) for name in names
    }


@cache
def one_process(model: str, clipping: str, optimizer: str, frozen: str) -> Run:
    """The numbers to reach: one process, the global batch in one piece."""
    case = Case(
        layout="",
        model=model,
        split="sequence+loss",
        sharding="by block",
        checkpointing="nothing recomputed",
        accumulation="one",
        clipping=clipping,
        optimizer=optimizer,
        frozen=frozen,
        compiled="not compiled",
    )
    return run_case(1, {"data_parallel": "none"}, case)


def run_case(world_size: int, layout: dict[str, Any], case: Case) -> Run:
    """Trains five steps and makes sure that all ranks saw the same numbers."""
    num_micro_batches, reduce = ACCUMULATION[case.accumulation]
    config = ParallelConfig(
        **layout,
        **SPLITS[case.split],
        **CHECKPOINTING[case.checkpointing],
        sharding=SHARDING[case.sharding],
        compile=COMPILE[case.compiled],
        reduce_gradients=reduce,
    )
    runs: list[Run] = run_ranks(
        world_size,
        run_on_rank,
        config,
        OPTIMIZERS[case.optimizer][0],
        MODELS[case.model],
        num_micro_batches,
        CLIPPING[case.clipping],
        FROZEN[case.frozen],
        case.sharding == "by predicate",
    )
    assert all((run.losses, run.norms) == (runs[0].losses, runs[0].norms) for run in runs)
    return runs[0]


def is_slow(case: Case) -> bool:
    """Rows that take seconds: compiled ones, and those on 8 ranks."""
    return COMPILE[case.compiled] or LAYOUTS[case.layout][0] == 8


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if is_slow(case) else [], id="/".join(case)) for case in TABLE],
)
def test_five_steps_equal_one_process(case: Case) -> None:
    run = run_case(*LAYOUTS[case.layout], case)
    reference = one_process(case.model, case.clipping, case.optimizer, case.frozen)
    tolerance = OPTIMIZERS[case.optimizer][1]
    assert difference(run.losses, reference.losses) < tolerance
    assert difference(run.norms, reference.norms) < tolerance
    assert run.parameters.keys() == reference.parameters.keys()
    worst = {fqn: difference(run.parameters[fqn], reference.parameters[fqn]) for fqn in reference.parameters}
    assert max(worst.values()) < tolerance, worst


def test_a_wrong_scale_of_gradients_would_fail_the_table() -> None:
    """A control: averaging over two ranks, the classic fault, is far outside the tolerance."""
    reference = one_process("grouped-query", "unclipped", "sgd", "all trained")
    halved: Run = run_ranks(1, run_halved)[0]
    assert difference(halved.parameters["head.weight"], reference.parameters["head.weight"]) > 1e-6
