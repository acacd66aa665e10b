"""Every composition with context parallel gives the numbers of one process, on packed documents that it cuts."""

from typing import Any, NamedTuple

import pytest

from parallel import ParallelConfig
from tests.covering import Row, all_pairs, covering_rows, pairs
from tests.parallel import test_parity as parity
from tests.parallel.parity_on_rank import run_on_rank
from tests.parallel.small_model import Run, adamw, difference
from tests.ranks import run_ranks

METHODS = ("allgather", "ring", "ulysses")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp-2": (2, {}),
    "cp-4": (4, {"cp": 4}),
    "shard_grad_op, cp-2": (2, {"strategy": "shard_grad_op"}),
    "full_shard-2 x cp-2": (4, {"dp_shard": 2}),
    "hybrid_shard-2 x cp-2": (4, {"strategy": "hybrid_shard", "dp_replicate": 2}),
    "no_shard-2 x cp-2": (4, {"strategy": "no_shard", "dp_replicate": 2}),
    "ddp-2 x cp-2": (4, {"data_parallel": "ddp", "dp_replicate": 2}),
    "zero1-2 x cp-2": (4, {"data_parallel": "zero1", "dp_replicate": 2}),
    "cp-2 x tp-2": (4, {"tp": 2}),
    "ddp, cp-2 x tp-2": (4, {"data_parallel": "ddp", "tp": 2}),
    "full_shard-2 x cp-2 x tp-2": (8, {"dp_shard": 2, "tp": 2}),
}
# With 2 key-value heads the ranks of ulysses are 4 in cp-4, and in cp-2 x tp-2 one a rank: both repeat them.
MODELS = ("grouped-query", "tied", "bias and q/k norm")
CHECKPOINTING = ("nothing recomputed", "all recomputed", "some ops recomputed")


class Case(NamedTuple):
    """One row of the table."""

    layout: str
    method: str
    model: str
    split: str
    checkpointing: str
    accumulation: str
    clipping: str
    optimizer: str


FACTORS = [
    list(LAYOUTS),
    list(METHODS),
    list(MODELS),
    list(parity.SPLITS),
    list(CHECKPOINTING),
    list(parity.ACCUMULATION),
    list(parity.CLIPPING),
    ["adamw", "sgd"],
]


def is_meaningful(row: Row) -> bool:
    """Leaves out what is refused, and what says nothing."""
    case = Case(*row)
    if "tp" not in case.layout and case.split != "sequence+loss":
        return False
    whole = case.layout.startswith(("ddp", "zero1"))
    return not (whole and case.accumulation == "three, reduced each")


TABLE = [Case(*row) for row in covering_rows(FACTORS, is_meaningful)]


def test_the_table_covers_every_pair_of_choices() -> None:
    assert all_pairs(FACTORS, is_meaningful) <= set().union(*map(pairs, TABLE))


def is_slow(case: Case) -> bool:
    """Rows on 8 ranks; a quick one of them is among the layouts that must train."""
    return LAYOUTS[case.layout][0] == 8


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if is_slow(case) else [], id="/".join(case)) for case in TABLE],
)
def test_five_steps_equal_one_process(case: Case) -> None:
    world_size, layout = LAYOUTS[case.layout]
    assert_parity(world_size, {"cp": 2, "cp_method": case.method} | layout, case)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks_equal_one_process(method: str) -> None:
    case = TABLE[0]._replace(checkpointing="some ops recomputed", optimizer="adamw")
    assert_parity(2, {"cp": 2, "cp_method": method}, case, compiled="compiled")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks_within_tensor_parallelism_equal_one_process(method: str) -> None:
    config = ParallelConfig(cp=2, cp_method=method, tp=2, compile=True)  # type: ignore[arg-type]
    # Four ranks that compile at the same time take minutes on two cores.
    run = run_ranks(4, run_on_rank, config, adamw, {}, 1, None, (), False, timeout_s=300.0)[0]
    assert_same(run, parity.one_process("grouped-query", "unclipped", "adamw", "all trained"), 1e-12)


def assert_parity(world_size: int, layout: dict[str, Any], case: Case, compiled: str = "not compiled") -> None:
    """Trains five steps on the layout and on one process."""
    choices = {name: choice for name, choice in case._asdict().items() if name != "method"}
    full = parity.Case(**choices, sharding="by block", frozen="all trained", compiled=compiled)
    run = parity.run_case(world_size, layout, full)
    reference = parity.one_process(case.model, case.clipping, case.optimizer, "all trained")
    assert_same(run, reference, parity.OPTIMIZERS[case.optimizer][1])


def assert_same(run: Run, reference: Run, tolerance: float) -> None:
    """Holds two trainings against each other."""
    assert difference(run.losses, reference.losses) < tolerance
    assert difference(run.norms, reference.norms) < tolerance
    assert run.parameters.keys() == reference.parameters.keys()
    worst = {fqn: difference(run.parameters[fqn], reference.parameters[fqn]) for fqn in reference.parameters}
    assert max(worst.values()) < tolerance, worst
