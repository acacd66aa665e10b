"""Faults that users of data-parallel tools met, each seen to be absent here: accumulation, unused parameters, data."""

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.llama import LlamaConfig
from parallel import (
    IGNORE_INDEX,
    Batch,
    Buckets,
    ParallelConfig,
    Precision,
    Sharding,
    build_mesh,
    while_all_have_data,
)
from parallel.replicas import local_part
from tests.parallel.branching_model import build_branching, marked
from tests.parallel.small_model import CONFIG, batches, build, bytes_at_rest, difference, sgd, train, whole
from tests.ranks import RankError, run_ranks

Where = set[tuple[int, int]]
MICRO_BATCHES = 3
EVERYWHERE = {(rank, number) for rank in range(2) for number in range(MICRO_BATCHES)}
# (rank, micro-batch) in which the loss uses the extra layer, and whether ranks differ in it.
BRANCHES: dict[str, Where] = {
    "in none": set(),
    "in all": EVERYWHERE,
    "in the first": {(0, 0), (1, 0)},
    "in the last": {(0, 2), (1, 2)},
    "in the first on one rank": {(0, 0)},
    "in the last on one rank": {(1, 2)},
}
ON_ALL_RANKS = [name for name in BRANCHES if "one rank" not in name]

Trace = tuple[list[float], dict[str, Tensor]]


def branch(fields: dict[str, Any], where: list[Where]) -> Trace:
    """A step of three micro-batches for each of `where`: losses, and parameters at the end."""
    trained = build_branching(ParallelConfig(**fields))
    optimizer = trained.build_optimizer(sgd)
    losses = []
    for step, each in enumerate(where):
        losses.append(trained.forward_backward(marked(trained.mesh, step, MICRO_BATCHES, each)).loss)
        optimizer.step()
    return losses, {fqn: whole(each) for fqn, each in trained.named_parameters().items()}


def branches(fields: dict[str, Any], names: list[str]) -> list[Trace]:
    return [branch(fields, [BRANCHES[name]] * 2) for name in names]


def close(one: Trace, other: Trace) -> bool:
    same = all(difference(one[1][fqn], other[1][fqn]) < 1e-13 for fqn in other[1])
    return same and one[0] == pytest.approx(other[0], rel=1e-14)


@pytest.fixture(scope="module")
def references() -> dict[str, Trace]:
    found = run_ranks(1, branches, {"data_parallel": "none"}, list(BRANCHES))[0]
    return dict(zip(BRANCHES, found, strict=True))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"data_parallel": "ddp", "buckets": Buckets(find_unused_parameters=True)}, list(BRANCHES)),
        ({"data_parallel": "ddp", "buckets": Buckets(static_graph=True)}, ["in none", "in all"]),
        ({"data_parallel": "ddp"}, ["in all", "in the last"]),
        ({}, ON_ALL_RANKS),
        ({"reduce_gradients": "last"}, ON_ALL_RANKS),
        ({"sharding": Sharding(find_unused_parameters=True)}, list(BRANCHES)),
        ({"sharding": Sharding(find_unused_parameters=True), "reduce_gradients": "last"}, list(BRANCHES)),
    ],
    ids=["ddp, looked for", "ddp, static", "ddp", "fsdp2", "fsdp2, last", "fsdp2, looked for", "fsdp2, both"],
)
def test_a_branch_that_some_micro_batches_use_trains_like_one_process(
    fields: dict[str, Any], names: list[str], references: dict[str, Trace]
) -> None:
    for found in run_ranks(2, branches, fields, names):
        assert [name for name, each in zip(names, found, strict=True) if not close(each, references[name])] == []


def refusal(fields: dict[str, Any], where: list[Where]) -> str:
    with pytest.raises(ValueError) as caught:
        branch(fields, where)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["ddp", "zero1"])
def test_a_parameter_that_only_earlier_micro_batches_used_is_named_before_ranks_diverge(backend: str) -> None:
    # Its gradient is there, so that only torch's next step would notice that the ranks' sums are missing.
    for said in run_ranks(2, refusal, {"data_parallel": backend}, [BRANCHES["in the first"]]):
        assert "did not use 1 parameters (extra.weight ...) in the last micro-batch" in said
        assert "buckets.find_unused_parameters=True" in said


def test_a_static_graph_that_changes_is_refused_with_the_name_in_the_step_that_changes_it() -> None:
    fields = {"data_parallel": "ddp", "buckets": Buckets(static_graph=True)}
    for said in run_ranks(2, refusal, fields, [EVERYWHERE, set()]):
        assert said.startswith(
            "static_graph=True promises that each micro-batch uses the same parameters, but the loss"
        )
        assert "extra.weight" in said


def test_one_rank_that_leaves_a_parameter_out_is_an_error_of_that_rank_within_seconds() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match=r"ValueError: the loss did not use 1 parameters \(extra.weight"):
        # The other rank waits for it, as long as the first is alive; a launcher ends both.
        run_ranks(2, branch, {"data_parallel": "ddp"}, [BRANCHES["in the last on one rank"]], timeout_s=3.0)
    assert time.monotonic() - start_s < 30


def test_promises_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="set one"):
        Buckets(find_unused_parameters=True, static_graph=True)
    with pytest.raises(ValueError, match=r"with tp=2 ddp sends a block's gradients at once, so .* has no meaning"):
        ParallelConfig(data_parallel="ddp", tp=2, buckets=Buckets(bucket_cap_mb=1.0))
    with pytest.raises(ValueError, match=r"sharding.find_unused_parameters=True has no meaning for fsdp1"):
        ParallelConfig(data_parallel="fsdp1", sharding=Sharding(find_unused_parameters=True))


BF16 = Precision(compute="bfloat16", reduce="float32")


def bf16_branch(reduce_gradients: str) -> list[float] | str:
    """Losses of two steps whose last micro-batch alone uses a layer, or what was refused."""
    config = ParallelConfig(precision=BF16, reduce_gradients=reduce_gradients)  # type: ignore[arg-type]
    trained = build_branching(config, dtype=torch.float32)
    optimizer = trained.build_optimizer(sgd)
    losses = []
    try:
        for step in range(2):
            mine = marked(trained.mesh, step, MICRO_BATCHES, BRANCHES["in the last"])
            losses.append(trained.forward_backward(mine).loss)
            optimizer.step()
    except ValueError as error:
        return str(error)
    return losses


def test_a_gradient_that_starts_in_the_last_micro_batch_is_summed_or_refused_in_words() -> None:
    first, second = run_ranks(2, bf16_branch, "every_micro_batch")
    assert first == second
    assert len(first) == 2
    for said in run_ranks(2, bf16_branch, "last"):
        assert "use reduce_gradients='every_micro_batch'" in said


def kept_between_micro_batches(reduce_gradients: str) -> int:
    """Bytes that a step has added once its first micro-batch is done."""
    config = ParallelConfig(precision=BF16, reduce_gradients=reduce_gradients)  # type: ignore[arg-type]
    trained = build(config, dtype=torch.float32)
    mine = batches(trained.mesh, 0, 2)
    run = trained.backend.run_micro_batch
    kept: list[int] = []

    def measured(*args: Any, **kwargs: Any) -> None:
        before = 0 if kept else bytes_at_rest(trained.mesh.device)
        run(*args, **kwargs)
        kept.append(0 if kept else bytes_at_rest(trained.mesh.device) - before)

    trained.backend.run_micro_batch = measured  # type: ignore[method-assign]
    trained.forward_backward(mine)
    return kept[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_deferred_sums_keep_four_bytes_of_each_parameter_and_others_the_share_of_a_rank(num_ranks: int) -> None:
    num_parameters = CONFIG.num_parameters
    scalars = 64  # the loss
    deferred, reduced = (
        run_ranks(num_ranks, kept_between_micro_batches, each)[0] for each in ("last", "every_micro_batch")
    )
    assert 0 <= deferred - 4 * num_parameters <= scalars
    assert 0 <= reduced - 4 * num_parameters // num_ranks <= scalars


def flags_seen(backend: str) -> list[tuple[bool, bool]]:
    """Whether DDP would sum, as forward and as backward of each micro-batch found it."""
    trained = build(ParallelConfig(data_parallel=backend))  # type: ignore[arg-type]
    seen: list[bool] = []
    forward = trained.source.forward

    def spied(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = forward(*args, **kwargs)
        seen.append(trained.model.require_backward_grad_sync)  # type: ignore[arg-type]
        loss.register_hook(lambda _: seen.append(trained.model.require_backward_grad_sync))  # type: ignore[arg-type]
        return loss

    trained.source.forward = spied
    trained.forward_backward(batches(trained.mesh, 0, MICRO_BATCHES))
    return list(zip(seen[::2], seen[1::2], strict=True))


@pytest.mark.parametrize("backend", ["ddp", "zero1"])
def test_forward_and_backward_of_a_micro_batch_agree_on_whether_it_is_summed(backend: str) -> None:
    expected = [(False, False)] * (MICRO_BATCHES - 1) + [(True, True)]
    assert run_ranks(2, flags_seen, backend) == [expected] * 2


def ranks_apart(fields: dict[str, Any]) -> float:
    """The largest difference of a parameter from rank 0's, after steps that accumulate."""
    trained = build(ParallelConfig(**fields))
    optimizer = trained.build_optimizer(sgd)
    for step in range(3):
        trained.forward_backward(batches(trained.mesh, step, 1 + step))
        optimizer.step()
    worst = 0.0
    for parameter in trained.named_parameters().values():
        first = local_part(parameter).clone()
        dist.broadcast(first, 0)
        worst = max(worst, (first - local_part(parameter)).abs().max().item())
    return worst


@pytest.mark.parametrize(
    "fields",
    [
        {"data_parallel": "ddp", "buckets": Buckets(static_graph=True)},
        {"data_parallel": "ddp", "buckets": Buckets(bucket_cap_mb=0.05)},
        {"data_parallel": "zero1"},
        {"strategy": "no_shard", "dp_replicate": 2, "dp_shard": 1},
    ],
    ids=["ddp, static", "ddp, small buckets", "zero1", "no_shard"],
)
def test_ranks_hold_bitwise_the_same_parameters_after_steps_of_one_two_and_three_micro_batches(
    fields: dict[str, Any],
) -> None:
    assert run_ranks(2, ranks_apart, fields) == [0.0, 0.0]


def checkpointed(fields: dict[str, Any]) -> list[float]:
    return train(ParallelConfig(**fields), num_micro_batches=3, steps=2).losses


@pytest.mark.parametrize("buckets", [Buckets(), Buckets(find_unused_parameters=True), Buckets(static_graph=True)])
def test_recomputed_activations_change_nothing_under_ddp_with_accumulation(buckets: Buckets) -> None:
    fields = {"data_parallel": "ddp", "buckets": buckets}
    expected = run_ranks(2, checkpointed, fields)
    assert run_ranks(2, checkpointed, {**fields, "activation_checkpointing": "full"}) == expected


MODEL = LlamaConfig(num_layers=1)
LAST_BATCHES: dict[str, list[tuple[int, int, int]]] = {
    # For each rank: rows, tokens of a row, and how many of them are valid.
    "fewer rows on one rank": [(3, 8, 8), (1, 8, 8)],
    "shorter rows on one rank": [(2, 8, 8), (2, 5, 3)],
    "no valid token on one rank": [(2, 8, 6), (1, 8, 0)],
}


def last_batch(rank: int, rows: int, length: int, num_valid: int) -> Batch:
    generator = torch.Generator().manual_seed(rank)
    tokens, labels = (torch.randint(0, 256, (rows, length), generator=generator) for _ in range(2))
    labels[:, num_valid:] = IGNORE_INDEX
    return Batch.from_tokens(tokens, labels)


def last_batches_alone() -> list[tuple[float, dict[str, Tensor]]]:
    """One process, both ranks' rows as two micro-batches."""
    return [_last_step({"data_parallel": "none"}, list(enumerate(sizes))) for sizes in LAST_BATCHES.values()]


def last_batches_shared(fields: dict[str, Any]) -> list[tuple[float, dict[str, Tensor]]]:
    rank = dist.get_rank()
    return [_last_step(fields, [(rank, sizes[rank])]) for sizes in LAST_BATCHES.values()]


def _last_step(fields: dict[str, Any], mine: list[tuple[int, tuple[int, int, int]]]) -> tuple[float, dict[str, Tensor]]:
    trained = build(ParallelConfig(**fields), MODEL)
    loss = trained.forward_backward([last_batch(rank, *sizes) for rank, sizes in mine]).loss
    gradients = {fqn: whole(each.grad) for fqn, each in trained.named_parameters().items() if each.grad is not None}
    return loss, gradients


def test_last_batches_of_unequal_size_count_by_their_tokens_on_every_backend() -> None:
    expected = run_ranks(1, last_batches_alone)[0]
    for fields in ({"data_parallel": "ddp"}, {"data_parallel": "zero1"}, {}):
        for found in run_ranks(2, last_batches_shared, fields):
            for name, (loss, gradients), (right_loss, right) in zip(LAST_BATCHES, found, expected, strict=True):
                assert loss == pytest.approx(right_loss, rel=1e-14), (fields, name)
                assert gradients.keys() == right.keys()
                assert all(difference(gradients[fqn], right[fqn]) < 1e-13 for fqn in right), (fields, name)


def until_the_first_rank_ends(fields: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Steps and evaluated batches of ranks that have 3 and 4 batches, and what they were told."""
    trained = build(ParallelConfig(**fields))
    mine = [batches(trained.mesh, step)[0] for step in range(3 + dist.get_rank())]
    num_steps = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in while_all_have_data(mine, trained.mesh):
            trained.forward_backward([batch])
            num_steps += 1
        evaluated = list(while_all_have_data(mine, trained.mesh))
        trained.evaluate(evaluated)
        # Equally many: nothing to say.
        assert len(list(while_all_have_data(mine[:2], trained.mesh))) == 2
    return num_steps, len(evaluated), [str(each.message) for each in caught if "ran out" in str(each.message)]


@pytest.mark.parametrize("fields", [{}, {"data_parallel": "ddp"}], ids=["fsdp2", "ddp"])
def test_ranks_that_run_out_of_data_at_different_times_stop_together_and_say_when(fields: dict[str, Any]) -> None:
    run_ranks(2, dist.get_rank)
    start_s = time.monotonic()
    found = run_ranks(2, until_the_first_rank_ends, fields)
    assert time.monotonic() - start_s < 10
    for rank, (num_steps, num_evaluated, said) in enumerate(found):
        assert (num_steps, num_evaluated) == (3, 3)
        has = "has no more" if rank == 0 else "has more"
        assert (
            said
            == [
                f"1 of 2 ranks ran out of data after 3 batches, so all stop there; this one {has}",
            ]
            * 2
        )


def out_of_step() -> tuple[str, str]:
    """Without it: evaluations of 3 and 4 batches, and a rank that evaluates while the other trains on."""
    trained = build(ParallelConfig(), MODEL)
    rank = dist.get_rank()
    mine = [last_batch(rank, 1, 8, 8)] * (3 + rank)
    with pytest.raises(ValueError) as uneven:
        trained.evaluate(mine)
    with pytest.raises(ValueError) as mixed:
        (trained.forward_backward if rank else trained.evaluate)(mine[:1])
    assert trained.evaluate(mine[:1]).num_valid_tokens == 16
    return str(uneven.value), str(mixed.value)


def test_ranks_that_bring_other_numbers_or_make_other_calls_all_say_so_and_go_on() -> None:
    for rank, (uneven, mixed) in enumerate(run_ranks(2, out_of_step)):
        assert f"this one brought {3 + rank} to evaluate, the mean over ranks is 3.50" in uneven
        assert f"this one brought 1 to {'forward_backward' if rank else 'evaluate'}" in mixed


class Unreadable(Exception):
    pass


def a_rank_that_cannot_read() -> str:
    mesh = build_mesh(ParallelConfig())

    def data() -> Iterator[int]:
        yield 1
        if dist.get_rank() == 1:
            raise Unreadable("a torn file")
        yield 2

    with pytest.raises((ValueError, Unreadable)) as caught:
        list(while_all_have_data(data(), mesh))
    return str(caught.value)


def test_a_rank_that_cannot_read_its_data_leaves_no_other_waiting() -> None:
    other, own = run_ranks(2, a_rank_that_cannot_read)
    assert own == "a torn file"
    assert "1 other ranks could not read their data" in other
