"""FSDP1 behind the same switch: the same names, numbers and steps as every other backend."""

from collections import Counter
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
from parallel.ledger.live import LiveBytes, LiveMeter, all_live_bytes
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
        trained = build(ParallelConfig(data_parallel=backend, **fields), dtype=torch.float32)  # type: ignore[arg-type]
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
        self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)
        self.spare = nn.Parameter(torch.ones(5))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor, *, labels: Tensor, **_: Any) -> Tensor:
        """A loss that is no language model's."""
        values: Tensor = self.used(tokens[:, :3].double()) * self.scale
        return values.pow(2).sum()


def test_parameters_that_a_loss_does_not_use_leave_ranks_alike() -> None:
    for with_state in run_ranks(3, partly_used):
        # FSDP1 takes zeros for a gradient that is missing in a unit that has others.
        assert with_state == ["spare", "scale", "used.weight", "used.bias"]


def partly_used() -> list[str]:
    torch.manual_seed(0)
    model = PartlyUsed().double()
    plan = ParallelPlan(shape=MODEL.shape, units=(Unit(modules=("used",)), Unit(modules=("idle",))))
    config = fsdp1({})
    trained = parallelize(model, build_mesh(config), config, plan)
    optimizer = trained.build_optimizer(adamw)
    trained.forward_backward(batches(trained.mesh, 0, 2))
    optimizer.step()
    return [fqn for fqn, each in trained.named_parameters().items() if each in optimizer.state]


# What a step sends and holds. FSDP1 aligns each parameter to 16 bytes, and fills a unit up to a multiple of ranks.

ALIGNMENT_BYTES = 16


def parameters_of_units(model: LlamaConfig) -> list[list[int]]:
    """Elements of each parameter: embedding, blocks, head, and the root with the final norm."""
    width, kv, wide = model.width, model.num_kv_heads * model.shape.head_dim, model.feed_forward_width
    attention = [width * width, kv * width, kv * width, width * width]
    block = [width, *attention, width, *[wide * width] * 3]
    embedding = [model.vocab_size * width]
    return [embedding, *[block] * model.num_layers, embedding, [width]]


def flat_elements(parameters: list[int], ranks: int, itemsize: int) -> int:
    """Elements of a unit with what fills it up."""
    total, aligned = 0, ALIGNMENT_BYTES // itemsize
    for elements in parameters:
        total += -total % aligned + elements
    return total + -total % ranks


SENT: dict[str, tuple[int, dict[str, Any], LlamaConfig, int]] = {
    "full_shard": (2, {}, MODEL, 1),
    "full_shard with padding": (3, {}, ODD, 1),
    "full_shard, accumulating": (2, {}, MODEL, 3),
    "full_shard, reduced last": (2, {"reduce_gradients": "last"}, MODEL, 3),
    "full_shard, last unit kept": (2, {"sharding": Sharding(keep_last_unit=True)}, MODEL, 1),
    "full_shard, prefetch": (2, {"sharding": Sharding(forward_prefetch=1, backward_prefetch=1)}, MODEL, 1),
    "shard_grad_op": (2, {"strategy": "shard_grad_op"}, ODD, 1),
    "no_shard": (2, {"strategy": "no_shard"}, ODD, 2),
    "hybrid_shard": (4, HYBRID, ODD, 1),
    "hybrid_shard_zero2": (4, HYBRID_ZERO2, MODEL, 2),
}


@pytest.mark.parametrize("name", SENT)
def test_a_step_sends_what_its_strategy_says(name: str) -> None:
    world_size, fields, model, num_micro_batches = SENT[name]
    config = fsdp1(fields)
    expected = expected_collectives(config, model, num_micro_batches, world_size)
    for found in run_ranks(world_size, counted, config, model, num_micro_batches):
        assert found == expected


def expected_collectives(config: ParallelConfig, model: LlamaConfig, times: int, world_size: int) -> Counter[Any]:
    strategy, hybrid = config.resolved_strategy, config.is_hybrid
    ranks = 1 if strategy == "no_shard" else world_size // config.dp_replicate
    # float64
    units = [flat_elements(each, ranks, 8) * 8 for each in parameters_of_units(model)]
    *inner, _root = units
    data = "fsdp" if ranks == world_size else ("dp" if hybrid else "dp_replicate")
    sent: Counter[Any] = Counter()
    # The root is gathered first and kept for its backward.
    again = inner if strategy in ("full_shard", "hybrid_shard") else []
    if config.sharding.keep_last_unit:
        again = [inner[0], *inner[2:]]  # blocks are alike
    reductions = 1 if config.reduce_gradients == "last" or strategy == "no_shard" else times
    if strategy == "no_shard":
        for unit in units:
            sent["all_reduce", data, "backward", unit] += reductions
    else:
        for unit in units:
            sent["all_gather", "fsdp", "forward", unit] += times
            sent["reduce_scatter", "fsdp", "backward", unit] += reductions
        for unit in again:
            sent["all_gather", "fsdp", "backward", unit] += times
        for unit in units if hybrid else ():
            sent["all_reduce", "dp_replicate", "backward", unit // ranks] += reductions
    # Valid tokens, refusals, micro-batches and their square; the summed loss.
    sent["all_reduce", data, "forward", 4 * 8] += 1
    sent["all_reduce", data, "forward", 8] += 1
    return sent


def counted(config: ParallelConfig, model: LlamaConfig, num_micro_batches: int) -> Counter[Any]:
    trained = build(config, model)
    mine = batches(trained.mesh, 0, num_micro_batches)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(mine)
    return Counter((each.kind, each.view, each.phase, each.payload_bytes) for each in counter.records)


HELD: dict[str, tuple[int, dict[str, Any], LlamaConfig, bool, int]] = {
    "full_shard keeps the root alone": (2, {}, MODEL, False, 4),
    "full_shard with padding": (3, {}, ODD, False, 4),
    "shard_grad_op keeps everything": (3, {"strategy": "shard_grad_op"}, ODD, True, 4),
    "in bf16 what is gathered is half as large": (
        2,
        {"strategy": "shard_grad_op", "precision": Precision(compute="bfloat16", reduce="float32")},
        MODEL,
        True,
        2,
    ),
    "hybrid_shard shares within a group": (4, HYBRID, MODEL, False, 4),
    "hybrid_shard_zero2 keeps everything": (4, HYBRID_ZERO2, ODD, True, 4),
}


@pytest.mark.parametrize("name", HELD)
def test_live_memory_equals_its_formula(name: str) -> None:
    world_size, fields, model, keeps_all, itemsize = HELD[name]
    units = parameters_of_units(model)
    ranks = world_size // fields.get("dp_replicate", 1)
    # Padding is that of the dtype in which units are gathered.
    flat = [flat_elements(each, ranks, itemsize) for each in units]
    shards = sum(flat) // ranks * 4
    gathered = sum(flat if keeps_all else flat[-1:]) * itemsize
    num_parameters = sum(map(len, units))
    own_elements = 0
    for rest, after_forward, after_backward, gradients, elements in run_ranks(
        world_size, measured, fsdp1(fields), model
    ):
        # AdamW keeps two moments of what a rank holds without padding, and a count of steps of every parameter.
        state = 2 * 4 * elements + 4 * num_parameters
        assert rest == LiveBytes(parameters=shards, unsharded=0, gradients=0, optimizer_state=state)
        assert after_forward == LiveBytes(parameters=shards, unsharded=gathered, gradients=0, optimizer_state=state)
        assert after_backward == LiveBytes(parameters=shards, unsharded=0, gradients=shards, optimizer_state=state)
        assert gradients == shards, "something else is left over after a step"
        own_elements += elements
    assert own_elements == sum(map(sum, units)) * fields.get("dp_replicate", 1)


def measured(config: ParallelConfig, model: LlamaConfig) -> tuple[LiveBytes, LiveBytes, LiveBytes, int, int]:
    trained = build(config, model, dtype=torch.float32)
    optimizer = trained.build_optimizer(adamw)
    mine = batches(trained.mesh, 0)
    trained.forward_backward(mine)
    optimizer.step()
    optimizer.zero_grad()
    trained.evaluate(mine)
    meter = LiveMeter(trained, optimizer)
    moments = [meter.measure()]
    before = all_live_bytes(trained.mesh.device)
    trained.model.register_forward_hook(lambda *_: moments.append(meter.measure()))
    trained.forward_backward(mine)
    moments.append(meter.measure())
    rest, after_forward, after_backward = moments
    elements = sum(parameter.numel() for parameter in trained.named_parameters().values())
    return rest, after_forward, after_backward, all_live_bytes(trained.mesh.device) - before, elements


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
    "summing whole gradients twice": (
        {"strategy": "no_shard", "reduce_gradients": "every_micro_batch"},
        {},
        "would sum again what it has summed before; use reduce_gradients='last'",
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
