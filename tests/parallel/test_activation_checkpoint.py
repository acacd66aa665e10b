"""What is computed again in backward is not kept, costs the collectives that it must, and changes no number or name."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checkpoint import TrainState, load, read_manifest, save
from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.plan import llama_plan
from parallel import CollectiveCounter, ParallelConfig, Sharding, Trained, build_mesh, parallelize
from parallel.activation_checkpoint import ATTENTION, POLICIES, Keep
from tests.parallel.small_model import (
    CONFIG,
    GLOBAL_BATCH,
    SEQUENCE_LENGTH,
    adamw,
    batches,
    build,
    difference,
    whole,
)
from tests.ranks import run_ranks

FLOAT = 8  # the small model is float64
D, F, H, L = CONFIG.width, CONFIG.feed_forward_width, CONFIG.num_heads, CONFIG.num_layers
KV = CONFIG.num_kv_heads * CONFIG.shape.head_dim
WITHIN = Sharding(units="size", unit_min_parameters=3000)
"""Units within blocks."""

ONE: dict[str, Any] = {"data_parallel": "none"}
FULL: dict[str, Any] = {"activation_checkpointing": "full"}
FULL_SECOND: dict[str, Any] = {"activation_checkpointing": "full", "activation_checkpoint_every": 2}
SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective"}


def selective(policy: str) -> dict[str, Any]:
    return {**SELECTIVE, "activation_checkpoint_policy": policy}


class Kept(TorchDispatchMode):
    """Finds how much of what ops made while it was entered is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # a DTensor's local ops come back here
        self._take_note(args, made=False)
        results = func(*args, **(kwargs or {}))
        self._take_note(results, made=True)
        return results

    def _take_note(self, tensors: Any, *, made: bool) -> None:
        """Parameters and inputs are seen as arguments first, so that views of them count as nothing made."""
        for each in tree_leaves(tensors):
            if type(each) in (Tensor, nn.Parameter):
                storage = each.untyped_storage()
                size = storage.nbytes() if made else 0
                self.storages.setdefault(storage._cdata, (StorageWeakRef(storage), size))

    def alive_bytes(self) -> int:
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def kept_bytes(layout: dict[str, Any], modes: list[dict[str, Any]]) -> list[int]:
    """Bytes that blocks have made and that are held at the end of forward, the output of each among them."""
    return [kept_bytes_of(ParallelConfig(**layout, **mode)) for mode in modes]


def kept_bytes_of(config: ParallelConfig) -> int:
    trained = build(config)
    kept = Kept()
    alive = []
    for block in trained.source.blocks.values():  # type: ignore[operator]
        block.forward = within(kept, block.forward)
    trained.model.register_forward_hook(lambda *_: alive.append(kept.alive_bytes()))
    trained.forward_backward(batches(trained.mesh, 0))
    return alive[0]


def within(mode: TorchDispatchMode, forward: Any) -> Any:
    def called_within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return called_within


@pytest.mark.parametrize(
    ("layout", "world_size", "tp", "dp"),
    [(ONE, 1, 1, 1), ({}, 2, 1, 2), ({"tp": 2}, 2, 2, 1)],
    ids=["one process", "full_shard 2", "tp 2"],
)
def test_what_blocks_keep_equals_formulas(layout: dict[str, Any], world_size: int, tp: int, dp: int) -> None:
    modes = [{}, selective("matmuls"), SELECTIVE, selective("attention"), FULL, FULL_SECOND]
    none, matmuls, second, attention, full, full_second = run_ranks(world_size, kept_bytes, layout, modes)[0]
    token = GLOBAL_BATCH * SEQUENCE_LENGTH * FLOAT * L // dp
    # A block's output is the input that the next one keeps, so one of them is all that a block adds.
    assert full == token * D // tp
    # Attention's output beside the logarithm of its denominators; what tp adds up, after attention and feed-forward.
    sums = 2 * D // tp if tp > 1 else 0
    assert attention - full == token * ((D + H) // tp + sums)
    if tp == 1:
        assert second - attention == token * (KV + D + F)  # k, o and up
        assert matmuls - attention == token * (2 * D + 2 * KV + 2 * F + D)
    else:  # The outputs of o and down are parts of sums, of which the sum is kept instead.
        assert second - attention == token * (KV + F) // tp  # k and gate
        assert matmuls - attention == token * (D + 2 * KV + 2 * F) // tp
    assert full_second == (full + none) // 2
    assert full < attention < second < matmuls < none


def extra_collectives(layout: dict[str, Any], mode: dict[str, Any]) -> tuple[dict[Any, int], dict[Any, int]]:
    """What a step sends beyond the same step without checkpointing, and what it does not send."""
    plain, recomputed = counted(ParallelConfig(**layout)), counted(ParallelConfig(**layout, **mode))
    return dict(recomputed - plain), dict(plain - recomputed)


def counted(config: ParallelConfig) -> Counter[tuple[str, str, str, int]]:
    trained = build(config)
    mine = batches(trained.mesh, 0)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(mine)
    return Counter((each.kind, each.view, each.phase, each.payload_bytes) for each in counter.records)


TP, TP_WHOLE = {"tp": 2}, {"tp": 2, "sequence_parallel": False}
# Layout, its ranks and dp; the mode; what each checkpointed block repeats, and how many blocks are.
REPEATED: dict[str, tuple[dict[str, Any], int, int, dict[str, Any], dict[str, int], int]] = {
    "full_shard gathers a unit once for recompute and backward": ({}, 2, 2, FULL, {}, L),
    "full_shard with units within blocks": ({"sharding": WITHIN}, 2, 2, FULL, {}, L),
    "full_shard, selective": ({}, 2, 2, SELECTIVE, {}, L),
    # Recompute ends at the last thing that backward needs, before the sum that ends a block.
    "tp with sequence parallel": (TP, 2, 1, FULL, {"all_gather": 2, "reduce_scatter": 1}, L),
    "tp with sequence parallel, every second block": (TP, 2, 1, FULL_SECOND, {"all_gather": 2, "reduce_scatter": 1}, 1),
    "tp with sequence parallel keeps sums": (TP, 2, 1, selective("attention"), {"all_gather": 2}, L),
    "tp": (TP_WHOLE, 2, 1, FULL, {"all_reduce": 1}, L),
    "tp keeps sums": (TP_WHOLE, 2, 1, SELECTIVE, {}, L),
    "full_shard x tp": (TP, 4, 2, FULL, {"all_gather": 2, "reduce_scatter": 1}, L),
}


@pytest.mark.parametrize("name", REPEATED)
def test_backward_repeats_these_collectives_of_forward(name: str) -> None:
    layout, world_size, dp, mode, repeated, num_blocks = REPEATED[name]
    hidden = GLOBAL_BATCH * SEQUENCE_LENGTH * D * FLOAT // dp
    expected = {(kind, "tp", "backward", hidden): count * num_blocks for kind, count in repeated.items()}
    for extra in run_ranks(world_size, extra_collectives, layout, mode):
        assert extra == (expected, {})


def test_full_checkpointing_runs_the_first_block_and_every_nth_after_it_twice() -> None:
    for every, expected in [(1, [2, 2, 2, 2]), (2, [2, 1, 2, 1]), (3, [2, 1, 1, 2]), (9, [2, 1, 1, 1])]:
        assert run_ranks(1, passes, every) == [[1, *expected, 1]]


def passes(every: int) -> list[int]:
    """How often embedding, the norm of each block and the last norm ran in one step."""
    trained = build(ParallelConfig(**ONE, **FULL, activation_checkpoint_every=every), LlamaConfig(num_layers=4))
    fqns = ["embed", *(f"blocks.{index}.attention_norm" for index in range(4)), "norm"]
    count: Counter[str] = Counter()
    for fqn in fqns:
        trained.source.get_submodule(fqn).register_forward_hook(lambda *_, fqn=fqn: count.update([fqn]))
    trained.forward_backward(batches(trained.mesh, 0))
    return [count[fqn] for fqn in fqns]


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (2, FULL),
        (2, FULL | {"sharding": WITHIN}),
        (2, SELECTIVE),
        (2, SELECTIVE | {"strategy": "shard_grad_op"}),
        (4, FULL | {"tp": 2}),
    ],
    ids=["full", "full, units within blocks", "selective", "shard_grad_op", "tp"],
)
def test_two_forwards_before_one_backward_find_their_parameters_gathered(
    world_size: int, fields: dict[str, Any]
) -> None:
    reference = run_ranks(1, gradients_of_two_forwards, ParallelConfig(**ONE))[0]
    gradients = run_ranks(world_size, gradients_of_two_forwards, ParallelConfig(**fields))[0]
    worst = {fqn: difference(gradients[fqn], reference[fqn]) for fqn in reference}
    assert max(worst.values()) < 1e-13, worst


def gradients_of_two_forwards(config: ParallelConfig) -> dict[str, Tensor]:
    trained = build(config)
    losses = [
        trained.model(each.tokens, positions=each.positions, document_ids=each.document_ids, labels=each.labels)
        for each in batches(trained.mesh, 0, 2)
    ]
    (losses[0] + losses[1]).backward()
    return {fqn: whole(each.grad) for fqn, each in trained.named_parameters().items() if each.grad is not None}


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, FULL), (FULL, {}), (SELECTIVE, FULL_SECOND)]


def test_checkpoints_and_names_know_nothing_of_activation_checkpointing(tmp_path: Path) -> None:
    assert run_ranks(2, change_between_save_and_load, str(tmp_path), CHANGES) == [[]] * 2


def change_between_save_and_load(folder: str, changes: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """What is wrong after a save under one mode and a load under another."""
    names = plain_names()
    entries = {f"optimizer.{fqn}.{entry}" for fqn in names for entry in ("step", "exp_avg", "exp_avg_sq")}
    wrong = []
    for index, (before, after) in enumerate(changes):
        trained, other = build(ParallelConfig(**before)), build(ParallelConfig(**after), seed=1)
        optimizer, other_optimizer = trained.build_optimizer(adamw), other.build_optimizer(adamw)
        one_loss(trained, optimizer, 0)
        path = save(Path(folder) / str(index), TrainState(trained=trained, optimizer=optimizer))
        load(path, TrainState(trained=other, optimizer=other_optimizer))
        # The second loss comes from what the optimizer made of its loaded state.
        losses = [one_loss(trained, optimizer, step) for step in (1, 2)]
        if losses != [one_loss(other, other_optimizer, step) for step in (1, 2)]:
            wrong.append(f"{before} -> {after}: losses")
        stored = {name for name in read_manifest(path).tensors if not name.startswith("rng.")}
        if stored != {f"model.{fqn}" for fqn in names} | entries:
            wrong.append(f"{before}: stored names {sorted(stored)[:4]}")
        if set(trained.source.state_dict()) != names or set(trained.named_parameters()) != names:
            wrong.append(f"{before}: the model's own names")
    return wrong


def one_loss(trained: Trained, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = trained.forward_backward(batches(trained.mesh, step)).loss
    optimizer.step()
    return loss


def plain_names() -> set[str]:
    with torch.device("meta"):
        return set(Llama(CONFIG).state_dict())


def test_a_recipe_can_name_a_policy_of_its_own() -> None:
    [(alone, gone)] = run_ranks(1, kept_by_own_policy)
    assert alone == gone == GLOBAL_BATCH * SEQUENCE_LENGTH * FLOAT * L * (2 * D + H)


def kept_by_own_policy() -> tuple[int, int]:
    def attention_alone() -> Keep:
        return lambda op, arguments: op in ATTENTION

    POLICIES["attention alone"] = attention_alone
    try:
        return tuple(kept_bytes(ONE, [selective("attention alone"), selective("attention")]))  # type: ignore[return-value]
    finally:
        del POLICIES["attention alone"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            selective("every_third_matmul"),
            "unknown activation_checkpoint_policy 'every_third_matmul'; legal: every_second_matmul, attention, matmuls",
        ),
        (
            SELECTIVE | {"sharding": WITHIN},
            "selective' sees each block as one sequence of ops, but 12 sharding units lie within.*use units='block'",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_changed(fields: dict[str, Any], message: str) -> None:
    [(said, changed)] = run_ranks(1, refused, fields)
    assert re.search(message, said)
    assert not changed


def refused(fields: dict[str, Any]) -> tuple[str, bool]:
    """What `parallelize` says, and whether it changed the model."""
    config = ParallelConfig(**fields)
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(CONFIG)
    before = dict(model.named_parameters())
    try:
        parallelize(model, mesh, config, llama_plan(CONFIG))
    except ValueError as error:
        forwards = [fqn for fqn, module in model.named_modules() if "forward" in vars(module)]
        return str(error), bool(forwards) or dict(model.named_parameters()) != before
    return "nothing", True
