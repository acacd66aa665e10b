"""FSDP1 behind the same switch: the same names, numbers and steps as every other backend."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import parallel.compile
from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.plan import llama_plan
from parallel import (
    CollectiveCounter,
    ParallelConfig,
    ParallelPlan,
    Precision,
    Sharding,
    Unit,
    build_mesh,
    parallelize,
)
from tests.parallel.small_model import adamw, batches, build, whole_parameters
from tests.ranks import run_ranks

MODEL = LlamaConfig(num_layers=2)
# Sizes that neither ranks nor the alignment of addresses divide.
ODD = LlamaConfig(num_layers=2, width=22, num_heads=1, num_kv_heads=1, feed_forward_width=15, vocab_size=259)
FROZEN = ("embed.weight", "blocks.0.attention.q_proj.weight", "blocks.1.feed_forward_norm.weight")
HYBRID = {"strategy": "hybrid_shard", "dp_replicate": 2}
HYBRID_ZERO2 = {"strategy": "hybrid_shard_zero2", "dp_replicate": 2}
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "full_shard": (2, {}),
    "full_shard on 3 ranks": (3, {}),
    "shard_grad_op": (2, {"strategy": "shard_grad_op"}),
    "no_shard": (2, {"strategy": "no_shard"}),
    "hybrid_shard": (4, HYBRID),
    "hybrid_shard_zero2": (4, HYBRID_ZERO2),
    "hybrid_shard of one rank a group": (2, HYBRID),
    "one rank": (1, {}),
    "full_shard x tp": (4, {"tp": 2}),
}


def fsdp1(fields: dict[str, Any]) -> ParallelConfig:
    return ParallelConfig(data_parallel="fsdp1", **fields)


# Names, initial values and what a rank holds.


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_rank_s_ranges_make_up_the_model_under_the_names_of_its_author(name: str) -> None:
    world_size, fields = STRATEGIES[name]
    model = MODEL if "tp" in fields else ODD
    reference, gathered = run_ranks(1, initial_values, ParallelConfig(data_parallel="none"), model)[0]
    for values, summoned in run_ranks(world_size, initial_values, fsdp1(fields), model):
        assert list(values) == list(reference)
        assert all(torch.equal(values[fqn], reference[fqn]) for fqn in reference)
        # FSDP1's own gather, which knows nothing of tensor parallelism's parts.
        if "tp" not in fields:
            assert all(torch.equal(summoned[fqn], reference[fqn]) for fqn in reference)
    assert gathered == {}


def initial_values(
    config: ParallelConfig, model: LlamaConfig
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Whole parameters from their canonical form, and as FSDP1 gathers them."""
    trained = build(config, model)
    values = whole_parameters(trained)
    if not isinstance(trained.model, FullyShardedDataParallel):
        return values, {}
    with FullyShardedDataParallel.summon_full_params(trained.model, writeback=False):
        gathered = {fqn: each.detach().clone() for fqn, each in trained.source.named_parameters()}
    assert [fqn for fqn, _ in trained.source.named_parameters()] == list(values)
    assert trained.source.get_parameter("blocks.1.feed_forward.down_proj.weight").dim() == (
        2 if config.resolved_strategy == "no_shard" or trained.mesh.degree("fsdp") == 1 else 1
    )
    return values, gathered


def test_names_stay_under_recomputation_and_compilation() -> None:
    for names, reference in run_ranks(2, names_within):
        assert names == reference


def names_within() -> tuple[list[str], list[str]]:
    parallel.compile.BACKEND = "aot_eager"
    trained = build(fsdp1({"activation_checkpointing": "full", "compile": True}))
    with torch.device("meta"):
        reference = [fqn for fqn, _ in Llama(MODEL).named_parameters()]
    trained.evaluate(batches(trained.mesh, 0))
    return list(trained.named_parameters()), reference


def test_what_a_factory_sees_and_what_the_optimizer_holds() -> None:
    for shapes, groups, entries, moments in run_ranks(3, grouped):
        assert shapes == {fqn: tuple(each.shape) for fqn, each in Llama(ODD).named_parameters()}
        vectors = [fqn for fqn, shape in shapes.items() if len(shape) == 1]
        assert groups == [[fqn for fqn in shapes if fqn not in vectors], vectors]
        # Every rank has state for every parameter, of which it may hold nothing.
        assert entries == [3] * len(shapes)
        assert moments


def grouped() -> Any:
    trained = build(fsdp1({}), ODD)
    shapes: dict[str, tuple[int, ...]] = {}

    def factory(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        shapes.update({fqn: tuple(each.shape) for fqn, each in named.items()})
        matrices = [each for each in named.values() if each.dim() > 1]
        return torch.optim.AdamW([{"params": matrices}, {"params": [p for p in named.values() if p.dim() == 1]}])

    optimizer = trained.build_optimizer(factory)
    trained.forward_backward(batches(trained.mesh, 0))
    optimizer.step()
    held = trained.named_parameters()
    fqns = {id(parameter): fqn for fqn, parameter in held.items()}
    groups = [[fqns[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    same = all(optimizer.state[each]["exp_avg"].shape == each.shape for each in held.values())
    return shapes, groups, [len(optimizer.state[each]) for each in held.values()], same


def test_optimizers_that_need_whole_parameters_are_refused() -> None:
    for adagrad, adafactor in run_ranks(2, unfit_optimizers):
        assert "Adagrad makes its state when it is built" in adagrad
        assert "Adafactor looks at whole matrices" in adafactor


def unfit_optimizers() -> list[str]:
    trained = build(fsdp1({}))
    said = []
    for kind in (torch.optim.Adagrad, torch.optim.Adafactor):
        with pytest.raises(ValueError) as caught:
            trained.build_optimizer(lambda named, kind=kind: kind(list(named.values())))  # type: ignore[misc]
        said.append(str(caught.value))
    return said


# Numbers.


@pytest.mark.parametrize("name", ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"])
@pytest.mark.parametrize("reduce", ["stored", "float32"])
def test_mixed_precision_gives_the_bits_of_fsdp2(name: str, reduce: Any) -> None:
    world_size, fields = STRATEGIES[name]
    fields = {**fields, "precision": Precision(compute="bfloat16", reduce=reduce)}
    for ours, theirs in run_ranks(world_size, both_generations, fields):
        assert ours == theirs


def both_generations(fields: dict[str, Any]) -> list[tuple[list[float], list[float], dict[str, str]]]:
    found = []
    for backend in ("fsdp1", "fsdp2"):
        trained = build(ParallelConfig(data_parallel=backend, **fields), dtype=torch.float32)
        optimizer = trained.build_optimizer(adamw)
        losses, norms = [], []
        for step in range(2):
            losses.append(trained.forward_backward(batches(trained.mesh, step)).loss)
            # Norms add up other pieces, so they agree but for rounding.
            norms.append(round(trained.clip_gradients(None).item(), 5))
            optimizer.step()
        assert all(each.dtype == torch.float32 for each in trained.named_parameters().values())
        digests = {fqn: str(each.double().sum().item()) for fqn, each in whole_parameters(trained).items()}
        found.append((losses, norms, digests))
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_evaluation_between_gradients_and_step_leaves_no_stale_parameters(name: str) -> None:
    world_size, fields = STRATEGIES[name]
    for undisturbed, evaluated, all_held in run_ranks(world_size, with_evaluation, fsdp1(fields)):
        assert evaluated == undisturbed
        assert all_held


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_unit_with_nothing_to_train_still_shows_its_parameters_after_a_step(strategy: str) -> None:
    config = fsdp1({"strategy": strategy})
    assert all(before == after for before, after in run_ranks(2, around_a_frozen_step, config))


def around_a_frozen_step(config: ParallelConfig) -> list[dict[str, int]]:
    """Parameters by fqn, with where they lie, before and after a step and an evaluation."""
    trained, found = build(config, frozen=["norm.weight"]), []
    for _ in range(2):
        found.append({fqn: id(each) for fqn, each in trained.named_parameters().items()})
        trained.forward_backward(batches(trained.mesh, 0))
        trained.evaluate(batches(trained.mesh, 1))
    return found


def with_evaluation(config: ParallelConfig) -> tuple[list[float], list[float], bool]:
    found = []
    for evaluates in (False, True):
        trained = build(config)
        if evaluates:
            trained.evaluate(batches(trained.mesh, 9))
        optimizer = trained.build_optimizer(adamw)
        losses = []
        for step in range(3):
            losses.append(trained.forward_backward(batches(trained.mesh, step)).loss)
            if evaluates:
                trained.evaluate(batches(trained.mesh, 9))
                trained.logits(batches(trained.mesh, 9)[0].tokens)
            optimizer.step()
        found.append(losses)
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return *found, held == {id(each) for each in trained.source.parameters()}  # type: ignore[return-value]


@pytest.mark.parametrize("name", STRATEGIES)
def test_frozen_parameters_within_a_unit_stay_as_they_are(name: str) -> None:
    world_size, fields = STRATEGIES[name]
    for before, after, trainable, with_state in run_ranks(world_size, with_frozen, fsdp1(fields)):
        assert [fqn for fqn in before if torch.equal(before[fqn], after[fqn])] == sorted(FROZEN, key=list(before).index)
        assert sorted(with_state) == sorted(trainable) == sorted(set(before) - set(FROZEN))


def with_frozen(config: ParallelConfig) -> Any:
    trained = build(config, frozen=FROZEN)
    optimizer = trained.build_optimizer(adamw)
    before = whole_parameters(trained)
    for step in range(2):
        trained.forward_backward(batches(trained.mesh, step, 3))
        optimizer.step()
    named = trained.named_parameters()
    trainable = [fqn for fqn, each in named.items() if each.requires_grad]
    return before, whole_parameters(trained), trainable, [fqn for fqn, each in named.items() if each in optimizer.state]


class PartlyUsed(nn.Module):
    """A unit that never runs, and a parameter of the root that a loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)
        self.spare = nn.Parameter(torch.ones(5))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor, *, labels: Tensor, **_: Any) -> Tensor:
        """A loss that is no language model's."""
        values: Tensor = self.used(tokens[:, :3].double()) * self.scale
        return values.pow(2).sum()


def test_a_unit_of_several_modules_is_left_to_the_root() -> None:
    for gathers in run_ranks(2, unit_of_two_modules):
        assert gathers == 1


def unit_of_two_modules() -> int:
    model = PartlyUsed().double()
    plan = ParallelPlan(shape=MODEL.shape, units=(Unit(modules=("used", "idle")),))
    config = fsdp1({})
    trained = parallelize(model, build_mesh(config), config, plan)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(batches(trained.mesh, 0))
    return counter.counts()["all_gather", "fsdp"]


def test_parameters_that_a_loss_does_not_use_leave_ranks_alike() -> None:
    for with_state in run_ranks(3, partly_used):
        # FSDP1 takes zeros for a gradient that is missing in a unit that has others.
        assert with_state == ["spare", "scale", "used.weight", "used.bias"]


def partly_used() -> list[str]:
    model = PartlyUsed().double()
    plan = ParallelPlan(shape=MODEL.shape, units=(Unit(modules=("used",)), Unit(modules=("idle",))))
    config = fsdp1({})
    trained = parallelize(model, build_mesh(config), config, plan)
    optimizer = trained.build_optimizer(adamw)
    trained.forward_backward(batches(trained.mesh, 0, 2))
    optimizer.step()
    return [fqn for fqn, each in trained.named_parameters().items() if each in optimizer.state]


# What is refused.


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "offloading on a CPU": (
        {"sharding": Sharding(cpu_offload=True)},
        {},
        "this mesh is on the CPU, where they are in host memory anyway; leave it out, or use data_parallel='fsdp2'",
    ),
    "tp without parameters to shard": (
        {"tp": 4, "dp_shard": 1},
        {},
        "fsdp1 with tp=4 needs dp_shard > 1",
    ),
    "no_shard with tp": ({"tp": 2, "strategy": "no_shard"}, {}, "use data_parallel='fsdp2'"),
    "tied embeddings with tp": ({"tp": 2}, {"tied_embeddings": True}, "would untie (('embed.weight', 'head.weight'),)"),
    "whole gradients with tp": (
        {"tp": 2, "reduce_gradients": "last"},
        {},
        "fsdp1 with tp=2 has no place for whole gradients that wait for the last micro-batch",
    ),
    "summing whole gradients twice": (
        {"strategy": "no_shard", "reduce_gradients": "every_micro_batch"},
        {},
        "only once a step where it holds them whole (dp_shard=1), as it would sum again what it has summed before",
    ),
}


def test_what_fsdp1_cannot_do_is_refused_on_every_rank_with_the_remedy_before_anything_changes() -> None:
    for said in run_ranks(4, refusals):
        for name, (_, _, message) in REFUSED.items():
            assert message in said[name], name


def refusals() -> dict[str, str]:
    said = {}
    for name, (fields, model, _) in REFUSED.items():
        config, model_config = fsdp1(fields), LlamaConfig(**{"num_layers": 1, **model})
        with torch.device("meta"):
            built = Llama(model_config)
        before = dict(built.named_parameters())
        mesh = build_mesh(config)
        with CollectiveCounter(mesh) as counter, pytest.raises(ValueError) as caught:
            parallelize(built, mesh, config, llama_plan(model_config))
        assert counter.records == []
        assert all(before[fqn] is each for fqn, each in built.named_parameters())
        said[name] = str(caught.value)
    return said
