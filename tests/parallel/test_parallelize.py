"""What does not fit is refused before anything changes; what fits trains like one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from models.llama import Llama, LlamaConfig, llama_plan
from models.moe import MoeConfig
from parallel import ParallelConfig, build_mesh, parallelize
from tests.models.moe.small_moe import build as build_moe
from tests.parallel.layout_rows import DENSE, MOE, SEQUENCE_LENGTH, config_of, name_of, rows
from tests.parallel.small_model import SEQUENCE_LENGTH as BATCH_LENGTH
from tests.parallel.small_model import batches, build, difference, sgd
from tests.ranks import run_ranks

MODEL = LlamaConfig(num_layers=1)


def seeded_model(seed: int, config: LlamaConfig = MODEL) -> Llama:
    """A real model as torch's own initialization draws it."""
    torch.manual_seed(seed)
    model = Llama(config).double()
    torch.nn.init.normal_(model.get_parameter("head.weight"), std=0.02)
    return model


def loss_of_a_real_model(fields: dict[str, Any]) -> float:
    config = ParallelConfig(**fields)
    trained = parallelize(seeded_model(0), build_mesh(config), config, llama_plan(MODEL))
    return trained.forward_backward(batches(trained.mesh, 0)).loss


def test_a_model_built_alike_on_every_rank_keeps_its_values() -> None:
    reference = run_ranks(1, loss_of_a_real_model, {"data_parallel": "none"})[0]
    for size, fields in ((2, {}), (2, {"tp": 2}), (4, {"strategy": "hybrid_shard", "dp_replicate": 2}), (4, {"tp": 2})):
        assert run_ranks(size, loss_of_a_real_model, fields) == [pytest.approx(reference, rel=1e-13)] * size


def unlike_on_rank_1() -> Llama:
    model = seeded_model(0)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("norm.weight")[3] += 1e-12
    return model


def on_meta_on_rank_1() -> Llama:
    with torch.device("meta" if dist.get_rank() == 1 else "cpu"):
        return Llama(MODEL)


def wider_on_rank_1() -> Llama:
    with torch.device("meta"):
        return Llama(replace(MODEL, vocab_size=260 + dist.get_rank()))


def with_few_heads() -> Llama:
    with torch.device("meta"):
        return Llama(FEW_HEADS)


def on_meta() -> Llama:
    with torch.device("meta"):
        return Llama(MODEL)


FEW_HEADS = replace(MODEL, num_kv_heads=2)
PLAN = llama_plan(MODEL)
TYPO = replace(PLAN, tensor_parallel={**PLAN.tensor_parallel, "blocks.*.attention.qproj": "colwise"})
HYBRID = ParallelConfig(strategy="hybrid_shard", dp_replicate=2)

# How a model is built, its plan, the layout, and what every rank must say.
REFUSALS: dict[str, tuple[Callable[[], Llama], Any, ParallelConfig, str]] = {
    "ranks seeded apart": (
        lambda: seeded_model(dist.get_rank()),
        PLAN,
        HYBRID,
        "ranks hold different values of 9 parameters (embed.weight, blocks.0.attention.q_proj.weight",
    ),
    "one element apart": (unlike_on_rank_1, PLAN, ParallelConfig(tp=2), "values of 1 parameters (norm.weight ...)"),
    "meta on one rank": (on_meta_on_rank_1, PLAN, ParallelConfig(), "ranks hold different models"),
    "other shapes on one rank": (wider_on_rank_1, PLAN, ParallelConfig(), "ranks hold different models"),
    "a typo in the plan": (
        on_meta,
        TYPO,
        ParallelConfig(tp=2),
        "'blocks.*.attention.qproj' matches no module of Llama",
    ),
    "fewer kv heads than tp": (
        with_few_heads,
        llama_plan(FEW_HEADS),
        ParallelConfig(tp=4),
        "tp=4 must divide num_kv_heads=2; legal here: [1, 2]",
    ),
}


def refusals() -> dict[str, tuple[str, bool]]:
    """What this rank says, and whether the model was left as it was."""
    found = {}
    for name, (make, plan, config, _) in REFUSALS.items():
        mesh, model = build_mesh(config), make()
        before = dict(model.named_parameters())
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        with pytest.raises(ValueError) as caught:
            parallelize(model, mesh, config, plan)
        after = dict(model.named_parameters())
        untouched = before.keys() == after.keys() and all(after[fqn] is each for fqn, each in before.items())
        untouched &= not any(isinstance(each, DTensor) for each in after.values())
        untouched &= hooks == [len(module._forward_pre_hooks) for module in model.modules()]
        found[name] = str(caught.value), untouched
    return found


def test_what_does_not_fit_is_refused_on_every_rank_before_anything_changes() -> None:
    for found in run_ranks(4, refusals):
        for name, (*_, message) in REFUSALS.items():
            said, untouched = found[name]
            assert message in said, name
            assert untouched, name


def test_a_mesh_of_another_config_is_refused() -> None:
    assert all("the mesh was built for" in each and "call build_mesh" in each for each in run_ranks(2, other_mesh))


def other_mesh() -> str:
    mesh = build_mesh(ParallelConfig(tp=2))
    with pytest.raises(ValueError) as caught:
        parallelize(on_meta(), mesh, ParallelConfig(), PLAN)
    return str(caught.value)


ROWS = rows("must_accept")


def test_the_rows_that_must_train_use_every_backend_and_axis_and_are_about_the_model_that_is_trained() -> None:
    assert len(ROWS) == 64
    assert {row["backend"] for row in ROWS} == {"ddp", "zero1", "fsdp1", "fsdp2"}
    assert all(any(row[axis] != "1" for row in ROWS) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
    assert (LlamaConfig().shape, BATCH_LENGTH) == (DENSE, SEQUENCE_LENGTH)
    assert MoeConfig().shape.num_experts == MOE.num_experts


def two_steps(kind: str, config: ParallelConfig, num_micro_batches: int) -> list[float]:
    """Losses and gradient norms of two steps of SGD of the model that the rows are about, and the loss after them."""
    trained = build_moe(config, {"num_layers": 4}) if kind == "moe" else build(config, LlamaConfig())
    optimizer = trained.build_optimizer(sgd)
    found = []
    for step in range(2):
        # 24 sequences on 8 ranks are 3 micro-batches of one.
        found.append(trained.forward_backward(batches(trained.mesh, step, num_micro_batches)).loss)
        found.append(trained.clip_gradients(1.0).item())
        optimizer.step()
    return [*found, trained.evaluate(batches(trained.mesh, 2)).loss]


@cache
def one_process(kind: str) -> list[float]:
    return run_ranks(1, two_steps, kind, ParallelConfig(data_parallel="none"), 1)[0]


def param_of(row: dict[str, str]) -> Any:
    """Eight ranks on two cores take their time."""
    return pytest.param(row, id=name_of(row), marks=pytest.mark.slow if row["world_size"] == "8" else ())


@pytest.mark.parametrize("row", map(param_of, ROWS))
def test_a_layout_that_must_train_takes_steps_like_one_process(row: dict[str, str]) -> None:
    num_micro_batches = 1 if int(row["world_size"]) == 8 else 2
    if row["pp"] != "1":
        num_micro_batches = int(row["micro_batches"])
    for found in run_ranks(int(row["world_size"]), two_steps, row["model"], config_of(row), num_micro_batches):
        assert difference(found, one_process(row["model"])) < 1e-13
