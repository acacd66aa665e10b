"""Random layouts are accepted or refused as arithmetic says, and those that are accepted take the step of one process.

The rules below are written from what each axis does to a model, not from the validator's code.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from models.llama import LlamaConfig
from models.moe import MoeConfig
from models.registry import family_of
from parallel import IGNORE_INDEX, Batch, ParallelConfig, Sharding, build_mesh, materialize, parallelize
from parallel.layout import check_layout, check_sequence_length, resolve
from tests.parallel.small_model import difference
from tests.ranks import RankError, run_ranks

SEED = 20
DRAWS = 2_000
STEPS = 100
"""Legal draws that take a step."""
FEW_STEPS = 6

MODELS: dict[str, LlamaConfig] = {
    "dense": LlamaConfig(),
    "deep": LlamaConfig(num_layers=9, width=32, feed_forward_width=48),
    "odd": LlamaConfig(num_layers=3, width=48, num_heads=6, num_kv_heads=3, feed_forward_width=88, vocab_size=7),
    "one kv head": LlamaConfig(num_layers=2, num_heads=4, num_kv_heads=1),
    "moe": MoeConfig(balance_loss=0.1),
    "few experts": MoeConfig(num_layers=2, num_experts=6, num_heads=4, num_kv_heads=4, balance_loss=0.1),
}
# Stages of a rank that each schedule runs, and whether a rank computes gradients of weights apart.
SCHEDULES = {
    "gpipe": (1, False),
    "1f1b": (1, False),
    "interleaved_1f1b": (2, False),
    "interleaved_zero_bubble": (2, True),
    "zbv_zero_bubble": (2, True),
    "dual_pipe_v": (2, True),
}
# Axes that a backend has no way for.
WITHOUT = {
    "none": ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"),
    "dp": ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"),
    "ddp": ("ep",),
    "zero1": ("pp", "tp", "ep"),
    "fsdp1": ("pp", "cp", "ep"),
    "fsdp2": (),
}
SHARDING_BACKENDS = ("fsdp1", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One layout, a world and a model."""

    world_size: int
    model: str
    micro_batches: int
    sequence_length: int
    data_parallel: str
    strategy: str | None
    pp: int
    schedule: str | None
    dp_replicate: int
    dp_shard: int
    cp: int
    cp_method: str | None
    tp: int
    ep: int
    sequence_parallel: bool
    activation_checkpointing: str
    reduce_gradients: str | None
    reshard_group: int | None

    def config(self) -> ParallelConfig:
        """What a user would write; its own checks run here."""
        names = set(self.__dataclass_fields__) - {"world_size", "model", "micro_batches", "sequence_length"}
        fields: dict[str, Any] = {name: getattr(self, name) for name in names - {"reshard_group"}}
        return ParallelConfig(**fields, sharding=Sharding(reshard_group=self.reshard_group))


def draw(generator: random.Random) -> Draw:
    """A layout that is legal about as often as not."""
    pick = generator.choice
    backend = pick(["fsdp2"] * 8 + ["fsdp1", "ddp", "ddp", "zero1", "none", "dp"])
    degree = {axis: pick([1, 1, 1, 1, 2, 2, 4, generator.randint(1, 5)]) for axis in ("pp", "cp", "tp")}
    for axis in degree:
        if axis in WITHOUT[backend] and generator.random() < 0.9:
            degree[axis] = 1
    strategies = [None, "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard"]
    strategy = pick(strategies) if backend in SHARDING_BACKENDS or generator.random() < 0.1 else None
    replicates = backend not in SHARDING_BACKENDS or strategy in ("hybrid_shard", "hybrid_shard_zero2", "no_shard")
    dp_replicate = pick([1, 2, 2, 3, 4]) if replicates else pick([1] * 9 + [2])
    shards = backend in SHARDING_BACKENDS and strategy != "no_shard"
    dp_shard = pick([1, 2, 2, 3, 4] if shards else [1] * 9 + [2])
    if backend in ("none", "dp") and generator.random() < 0.8:
        dp_replicate = dp_shard = 1
    world_size = dp_replicate * dp_shard * math.prod(degree.values())
    chance = generator.random()
    if chance < 0.1:
        world_size = generator.randint(1, 16)
    dp_shard = -1 if chance > 0.7 else dp_shard
    schedule = pick(list(SCHEDULES)) if (degree["pp"] > 1) == (generator.random() < 0.95) else None
    method = pick(["allgather", "ring", "ulysses"]) if (degree["cp"] > 1) == (generator.random() < 0.95) else None
    model = pick(list(MODELS))
    return Draw(
        world_size=world_size,
        model=model,
        micro_batches=max(1, degree["pp"] * pick([1, 1, 2, 2, 3]) + pick([0, 0, 0, 1, -1])),
        sequence_length=pick([32, 32, 32, 24, 16, 30]),
        data_parallel=backend,
        strategy=strategy,
        schedule=schedule,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp_method=method,
        ep=pick([1, 2, 2, 3, 4]) if model in ("moe", "few experts") else pick([1] * 12 + [2]),
        sequence_parallel=generator.random() < 0.7,
        activation_checkpointing=pick(["none", "none", "full", "selective"]),
        reduce_gradients=pick([None, None, None, "last", "every_micro_batch"]),
        reshard_group=pick([None] * 7 + [2, 4]),
        **degree,
    )


def rules(drawn: Draw) -> dict[str, bool]:
    """Every rule, and whether a draw breaks it; only the first where degrees do not make up the world."""
    sizes = _resolved(drawn)
    if sizes is None:
        return {"degrees make up the world": True}
    return dict([*_axis_rules(drawn, sizes), *_model_rules(drawn, sizes), *_policy_rules(drawn, sizes)])


def broken(drawn: Draw) -> list[str]:
    """The rules that a draw breaks."""
    return [rule for rule, is_broken in rules(drawn).items() if is_broken]


def _resolved(drawn: Draw) -> Draw | None:
    """The draw with every degree known; None where they do not multiply to the world."""
    others = drawn.pp * drawn.cp * drawn.tp * drawn.dp_replicate
    if drawn.dp_shard > 0:
        return drawn if others * drawn.dp_shard == drawn.world_size else None
    left, rest = divmod(drawn.world_size, others)
    if rest:
        return None
    if _strategy(drawn) == "no_shard":
        # Whoever shards nothing replicates over what is left.
        return replace(drawn, dp_replicate=drawn.dp_replicate * left, dp_shard=1)
    return replace(drawn, dp_shard=left)


def _strategy(drawn: Draw) -> str:
    if drawn.data_parallel not in SHARDING_BACKENDS:
        return "no_shard"
    return drawn.strategy or "full_shard"


def _axis_rules(drawn: Draw, sizes: Draw) -> list[tuple[str, bool]]:
    strategy, backend = _strategy(drawn), drawn.data_parallel
    whole = strategy == "no_shard"
    return [
        ("a backend that shards nothing has no strategy", drawn.strategy not in (None, strategy)),
        ("whole parameters leave nothing to shard", whole and sizes.dp_shard > 1),
        ("a hybrid needs replicas", strategy.startswith("hybrid") and drawn.dp_replicate == 1),
        (
            "only a hybrid has replicas of shards",
            strategy in ("full_shard", "shard_grad_op") and sizes.dp_replicate > 1,
        ),
        ("whole parameters have all experts", whole and drawn.ep > 1),
        ("an axis that the backend has no way for", any(getattr(sizes, axis) > 1 for axis in WITHOUT[backend])),
        ("a pipeline and a schedule come together", (drawn.pp > 1) != (drawn.schedule is not None)),
        ("parts of sequences and a method come together", (drawn.cp > 1) != (drawn.cp_method is not None)),
        (
            "whole parameters on replicas x cp are on no one axis beside tp",
            whole and min(sizes.cp, sizes.tp, sizes.dp_replicate) > 1,
        ),
    ]


def _model_rules(drawn: Draw, sizes: Draw) -> list[tuple[str, bool]]:
    model, tp = MODELS[drawn.model], drawn.tp
    split_parts = tp if drawn.sequence_parallel else 1
    # The ring gives each rank an early and a late piece, of whole tokens on each of the tp ranks.
    pieces = drawn.cp * (math.lcm(2, split_parts) if drawn.cp_method == "ring" else split_parts)
    shards = sizes.dp_shard * drawn.cp
    experts = model.num_experts if isinstance(model, MoeConfig) else 0
    rows = -(-model.vocab_size // tp)
    stages, rounds = drawn.pp * SCHEDULES[drawn.schedule or "gpipe"][0], max(1, drawn.micro_batches // drawn.pp)
    return [
        ("tp splits heads", model.num_heads % tp > 0 or model.num_kv_heads % tp > 0),
        ("tp splits the feed-forward layer", model.feed_forward_width % tp > 0),
        ("each tp rank has rows of the vocabulary", rows * (tp - 1) >= model.vocab_size),
        ("ulysses splits heads", drawn.cp_method == "ulysses" and model.num_heads % (tp * drawn.cp) > 0),
        ("sequences are cut into whole tokens", drawn.sequence_length % pieces > 0),
        ("experts need a model with experts", drawn.ep > 1 and experts == 0),
        ("ep splits experts", drawn.ep > 1 and experts > 0 and experts % drawn.ep > 0),
        ("ep is carved out of the shards", shards % drawn.ep > 0),
        ("each stage has a block", stages > model.num_layers and drawn.pp > 1),
        ("each stage is busy", drawn.pp > 1 and drawn.micro_batches < _fewest_micro_batches(drawn)),
        (
            "rounds are equally long",
            (drawn.schedule or "").startswith("interleaved") and drawn.micro_batches % rounds > 0,
        ),
    ]


def _fewest_micro_batches(drawn: Draw) -> int:
    # DualPipeV feeds both ends of its V at once.
    return drawn.pp * 2 if drawn.schedule == "dual_pipe_v" else drawn.pp


def _policy_rules(drawn: Draw, sizes: Draw) -> list[tuple[str, bool]]:
    strategy, shards, group = _strategy(drawn), sizes.dp_shard * drawn.cp, drawn.reshard_group
    each = drawn.reduce_gradients == "every_micro_batch"
    backend, fsdp1_tp = drawn.data_parallel, drawn.data_parallel == "fsdp1" and drawn.tp > 1
    splits_backward = SCHEDULES[drawn.schedule or "gpipe"][1]
    keeps_sharded = strategy in ("full_shard", "hybrid_shard")
    return [
        ("gradients that are whole are summed once", each and (backend in ("ddp", "zero1") or drawn.pp > 1)),
        ("a backward in halves has one graph", splits_backward and drawn.activation_checkpointing == "selective"),
        ("only fsdp2 shards anew over fewer ranks", group is not None and backend != "fsdp2"),
        ("what is kept whole is not sharded anew", group is not None and not keeps_sharded),
        ("stages stay gathered", group is not None and drawn.pp > 1),
        ("a group divides the shards", group is not None and (group >= shards or shards % group > 0)),
        ("torch builds smaller groups of all ranks", group is not None and drawn.tp > 1),
        ("fsdp1 on tp shards", fsdp1_tp and (shards == 1 or drawn.reduce_gradients == "last")),
        ("fsdp1 sums whole gradients once", each and backend == "fsdp1" and shards == 1),
    ]


def refusal(drawn: Draw) -> str | None:
    """What the toolkit says to a draw before any rank starts; None where it accepts it."""
    shape = MODELS[drawn.model].shape
    try:
        resolved = resolve(drawn.config(), drawn.world_size)
        check_layout(resolved, shape, num_micro_batches=drawn.micro_batches)
        check_sequence_length(resolved, drawn.sequence_length, shape)
    except ValueError as error:
        return str(error)
    return None


@cache
def draws() -> tuple[Draw, ...]:
    """The same ones on every machine."""
    generator = random.Random(SEED)
    return tuple(draw(generator) for _ in range(DRAWS))


def backend_decides(drawn: Draw) -> bool:
    """Whether only the backend refuses it, which needs a mesh and has its own tests."""
    found = broken(drawn)
    return bool(found) and all(rule.startswith("fsdp1 ") for rule in found)


def test_two_thousand_random_layouts_are_legal_as_the_rules_say() -> None:
    for drawn in draws():
        if not backend_decides(drawn):
            found, said = broken(drawn), refusal(drawn)
            assert (not found) == (said is None), f"{drawn}\nbroken: {found}\nsaid: {said}"


def test_the_draws_break_every_rule_and_use_every_choice() -> None:
    times = Counter(rule for drawn in draws() for rule in broken(drawn))
    assert set().union(*map(rules, draws())) == set(times)
    legal = [each for each in draws() if not broken(each)]
    assert len(legal) > 300
    for name, least in (("pp", 40), ("cp", 40), ("tp", 40), ("ep", 20)):
        assert sum(getattr(each, name) > 1 for each in legal) > least, name
    assert {each.schedule for each in legal} == {None, *SCHEDULES}
    assert {each.data_parallel for each in legal} == set(WITHOUT)
    assert {each.cp_method for each in legal} == {None, "allgather", "ring", "ulysses"}


def global_batch(num_rows: int, sequence_length: int, vocab_size: int) -> Batch:
    """Rows of which from some to all tokens are valid, each of two documents."""
    generator = torch.Generator().manual_seed(num_rows)
    tokens, labels = torch.randint(0, vocab_size, (2, num_rows, sequence_length), generator=generator)
    row, where = torch.arange(num_rows), torch.arange(sequence_length).expand(num_rows, -1)
    labels[where >= 1 + (row[:, None] * 7 + 5) % sequence_length] = IGNORE_INDEX
    border = 1 + (row[:, None] * 5 + 3) % sequence_length
    positions = torch.where(where >= border, where - border, where)
    return Batch(tokens=tokens, labels=labels, positions=positions, document_ids=(where >= border).long())


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    """Some rows of a batch."""
    assert batch.document_ids is not None
    return Batch(
        tokens=batch.tokens[start:stop],
        labels=batch.labels[start:stop],
        positions=batch.positions[start:stop],
        document_ids=batch.document_ids[start:stop],
    )


def step_of(name: str, config: ParallelConfig, micro_batches: int, num_rows: int, length: int) -> tuple[float, float]:
    """Loss and gradient norm of one step on a global batch of one row for each micro-batch and data-parallel rank."""
    model_config = MODELS[name]
    family = family_of(model_config)
    with torch.device("meta"):
        model = family.build(model_config).to(torch.float64)
    mesh = build_mesh(config)
    trained = parallelize(model, mesh, config, family.plan(model_config))
    materialize(trained)
    batch = global_batch(num_rows, length, model_config.vocab_size)
    each = num_rows // mesh.degree("dp") // micro_batches
    first = mesh.coordinate("dp") * micro_batches
    parts = [rows_of(batch, (first + index) * each, (first + index + 1) * each) for index in range(micro_batches)]
    result = trained.forward_backward(parts)
    return result.loss, trained.clip_gradients(None).item()


@cache
def one_process(name: str, num_rows: int, length: int) -> tuple[float, float]:
    found: tuple[float, float] = run_ranks(1, step_of, name, ParallelConfig(data_parallel="none"), 1, num_rows, length)[
        0
    ]
    return found


def assert_steps(chosen: list[Draw]) -> None:
    for drawn in chosen:
        sizes = _resolved(drawn)
        assert sizes
        num_rows = sizes.dp_replicate * sizes.dp_shard * drawn.micro_batches
        expected = one_process(drawn.model, num_rows, drawn.sequence_length)
        arguments = (drawn.model, drawn.config(), drawn.micro_batches, num_rows, drawn.sequence_length)
        try:
            runs = run_ranks(drawn.world_size, step_of, *arguments)
        except RankError as error:
            raise AssertionError(f"{drawn}\n{error}") from error
        assert max(difference(found, expected) for found in runs) < 1e-13, drawn


def legal_within(most_ranks: int) -> list[Draw]:
    """Legal draws for some ranks."""
    return [each for each in draws() if 1 < each.world_size <= most_ranks and not broken(each)]


def test_some_random_legal_layouts_take_the_step_of_one_process() -> None:
    assert_steps(legal_within(4)[:FEW_STEPS])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_random_legal_layouts_take_the_step_of_one_process() -> None:
    chosen = legal_within(8)[FEW_STEPS:][:STEPS]
    assert len(chosen) == STEPS
    assert_steps(chosen)
