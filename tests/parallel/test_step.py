"""A step's loss and gradients are per valid token of the global batch, and all ranks refuse a bad batch together."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.llama import LlamaConfig
from parallel import IGNORE_INDEX, Batch, ParallelConfig, StepResult, Trained
from tests.parallel.small_model import CONFIG, batches, build, difference, sgd, whole
from tests.ranks import run_ranks

MODEL = LlamaConfig(num_layers=1)
VALID_TOKENS = (1, 3, 5, 7)
LENGTH = 8


def sequences() -> Batch:
    """Four rows, with 1, 3, 5 and 7 tokens to predict."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 256, (4, LENGTH), generator=generator) for _ in range(2))
    labels[torch.arange(LENGTH) >= torch.tensor(VALID_TOKENS)[:, None]] = IGNORE_INDEX
    return Batch.from_tokens(tokens, labels)


def rows(batch: Batch, which: slice) -> Batch:
    return Batch(tokens=batch.tokens[which], labels=batch.labels[which], positions=batch.positions[which])


def ignored(batch: Batch) -> Batch:
    return replace(batch, labels=torch.full_like(batch.labels, IGNORE_INDEX))


def my_batches(trained: Trained, num_micro_batches: int) -> list[Batch]:
    size = 4 // trained.mesh.degree("dp") // num_micro_batches
    first = trained.mesh.coordinate("dp") * size * num_micro_batches
    return [rows(sequences(), slice(first + size * i, first + size * (i + 1))) for i in range(num_micro_batches)]


def gradients(trained: Trained) -> dict[str, Tensor]:
    return {fqn: whole(each.grad) for fqn, each in trained.named_parameters().items() if each.grad is not None}


def gradients_of_split(fields: dict[str, Any], num_micro_batches: int) -> tuple[StepResult, dict[str, Tensor]]:
    trained = build(ParallelConfig(**fields), MODEL)
    result = trained.forward_backward(my_batches(trained, num_micro_batches))
    assert trained.evaluate(my_batches(trained, num_micro_batches)) == result
    return result, gradients(trained)


def gradients_of_splits(splits: list[tuple[dict[str, Any], int]]) -> list[tuple[StepResult, dict[str, Tensor]]]:
    return [gradients_of_split(*split) for split in splits]


# Ranks: layouts with numbers of micro-batches.
SPLITS: dict[int, list[tuple[dict[str, Any], int]]] = {
    1: [({"data_parallel": "none"}, 2), ({"data_parallel": "none"}, 4), ({}, 1), ({"reduce_gradients": "last"}, 4)],
    2: [({}, 1), ({}, 2), ({"reduce_gradients": "last"}, 2), ({"tp": 2}, 1), ({"tp": 2}, 4)],
    4: [({}, 1), ({"tp": 2}, 2), ({"strategy": "hybrid_shard", "dp_replicate": 2}, 1)],
}


def test_loss_and_gradients_are_per_token_whatever_the_split() -> None:
    (expected, reference) = run_ranks(1, gradients_of_split, {"data_parallel": "none"}, 1)[0]
    assert expected.num_valid_tokens == sum(VALID_TOKENS)
    for size, splits in SPLITS.items():
        for found in run_ranks(size, gradients_of_splits, splits):
            for split, (result, each) in zip(splits, found, strict=True):
                assert result.num_valid_tokens == expected.num_valid_tokens and not result.skipped
                assert result.loss == pytest.approx(expected.loss, rel=1e-14), split
                assert each.keys() == reference.keys()
                assert all(difference(each[fqn], reference[fqn]) < 1e-13 for fqn in reference), split


def test_the_loss_of_one_process_is_the_mean_of_cross_entropy() -> None:
    loss, expected = run_ranks(1, loss_and_cross_entropy)[0]
    assert loss == pytest.approx(expected, rel=1e-14)


def loss_and_cross_entropy() -> tuple[float, float]:
    trained = build(ParallelConfig(data_parallel="none"), MODEL)
    logits, labels = trained.logits(sequences().tokens), sequences().labels
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
    return trained.evaluate([sequences()]).loss, expected.item()


def test_a_rank_without_valid_tokens_adds_nothing() -> None:
    (expected, reference) = run_ranks(1, gradients_with_ignored_rows)[0]
    for result, each in run_ranks(2, gradients_with_ignored_rows):
        assert (result.num_valid_tokens, result.loss) == (4, pytest.approx(expected.loss, rel=1e-14))
        assert all(difference(each[fqn], reference[fqn]) < 1e-13 for fqn in reference)


def gradients_with_ignored_rows() -> tuple[StepResult, dict[str, Tensor]]:
    """The first two rows alone, or on rank 0 while rank 1 has two rows of which nothing is predicted."""
    trained = build(ParallelConfig(), MODEL)
    first = rows(sequences(), slice(0, 2))
    result = trained.forward_backward([first if dist.get_rank() == 0 else ignored(rows(sequences(), slice(2, 4)))])
    return result, gradients(trained)


def test_a_batch_without_valid_tokens_is_skipped_with_one_warning_and_changes_nothing() -> None:
    for result, messages, unchanged, evaluated in run_ranks(2, step_on_nothing):
        assert result == StepResult(loss_sum=0.0, num_valid_tokens=0, skipped=True)
        assert math.isnan(result.loss) and math.isnan(evaluated)
        assert messages == ["no token of the global batch is valid: this step computes no gradient"]
        assert unchanged


def step_on_nothing() -> tuple[StepResult, list[str], bool, float]:
    trained = build(ParallelConfig(), MODEL)
    optimizer = trained.build_optimizer(sgd)
    trained.forward_backward(my_batches(trained, 1))
    before = {fqn: whole(each) for fqn, each in trained.named_parameters().items()}
    nothing = [ignored(batch) for batch in my_batches(trained, 2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = trained.forward_backward(nothing)
    trained.clip_gradients(1.0)
    optimizer.step()  # the gradients of the step before are gone too
    unchanged = all(torch.equal(before[fqn], whole(each)) for fqn, each in trained.named_parameters().items())
    return result, [str(each.message) for each in caught], unchanged, trained.evaluate(nothing).loss


def of_length(length: int) -> Batch:
    return Batch.from_tokens(*(torch.ones(2, length, dtype=torch.int64) for _ in range(2)))


def on_rank(rank: int, bad: list[Batch]) -> list[Batch]:
    return bad if dist.get_rank() == rank else [of_length(8)]


def with_element(name: str, value: int) -> Batch:
    batch = of_length(8)
    getattr(batch, name)[1, 3] = value
    return batch


# What a rank brings, and what some rank must then say; the others say that ranks refused or differ.
BAD: dict[str, tuple[Callable[[], list[Batch]], str]] = {
    "a length that tp does not divide, everywhere": (
        lambda: [of_length(5)],
        "sequence_length=5; nearest legal: 4 or 6",
    ),
    "such a length on a whole tp group": (
        lambda: [of_length(5)] if dist.get_rank() < 2 else [of_length(8)],
        "sequence_length=5; nearest legal: 4 or 6",
    ),
    "such a length on one rank": (lambda: on_rank(1, [of_length(8), of_length(5)]), "sequence_length=5; nearest"),
    "other tokens on one rank": (lambda: on_rank(3, [with_element("tokens", 7)]), "split each matrix between them"),
    "other labels on one rank": (lambda: on_rank(0, [with_element("labels", 7)]), "split each matrix between them"),
    "fewer rows on one rank": (lambda: on_rank(2, [rows(of_length(8), slice(1))]), "split each matrix between them"),
    "one more micro-batch on one rank": (lambda: on_rank(2, [of_length(8)] * 2), "split each matrix between them"),
    "one more micro-batch on a whole tp group": (
        lambda: [of_length(8)] * (2 if dist.get_rank() < 2 else 1),
        "every rank must bring as many micro-batches",
    ),
    "nothing": (list, "a step needs at least one micro-batch"),
    "a token outside the vocabulary": (
        lambda: on_rank(0, [with_element("tokens", 260)]),
        "tokens hold 260, but the vocabulary has 260 entries",
    ),
    "a label outside the vocabulary": (lambda: [with_element("labels", -1)], "labels hold -1"),
}


def test_every_rank_refuses_a_batch_that_is_bad_on_any_before_a_collective_of_the_model() -> None:
    results = run_ranks(4, refusals)
    for number, (name, (_, message)) in enumerate(BAD.items()):
        said = [on_each[number] for on_each in results]
        assert any(message in each for each in said), (name, said)
        assert all(said), (name, said)
    assert all(math.isfinite(on_each[-1]) for on_each in results)


def refusals() -> list[Any]:
    """What this rank says to each; then the loss of a good batch, for which all ranks must still be in step."""
    trained = build(ParallelConfig(tp=2), MODEL)
    said: list[Any] = []
    for index, (make, _) in enumerate(BAD.values()):
        act = trained.evaluate if index % 2 else trained.forward_backward
        with pytest.raises(ValueError) as caught:
            act(make())
        said.append(str(caught.value))
    return [*said, trained.forward_backward([of_length(8)]).loss]


def test_ranks_that_bring_different_numbers_of_micro_batches_all_say_so() -> None:
    results = run_ranks(3, uneven_numbers)
    for rank, message in enumerate(results):
        assert f"this one brought {rank + 1} to forward_backward, the mean over ranks is 2.00" in message


def uneven_numbers() -> str:
    trained = build(ParallelConfig(), MODEL)
    with pytest.raises(ValueError) as caught:
        trained.forward_backward([of_length(8)] * (dist.get_rank() + 1))
    return str(caught.value)


def one_rank_with_a_bad_batch(kind: str) -> str:
    trained = build(ParallelConfig())
    good = batches(trained.mesh, 0)
    bad: Any = [object()] if kind == "no batch" else [_too_long()]
    mine = bad if dist.get_rank() == 1 else good
    for call in (trained.forward_backward, trained.evaluate):
        with pytest.raises((ValueError, AttributeError)) as caught:
            call(mine)
    return str(caught.value)


def _too_long() -> Batch:
    tokens = torch.zeros(1, CONFIG.max_sequence_length + 1, dtype=torch.int64)
    return Batch.from_tokens(tokens, tokens)


def test_a_batch_that_is_too_long_or_none_at_all_is_refused_on_every_rank() -> None:
    other, own = run_ranks(2, one_rank_with_a_bad_batch, "too long")
    assert "1 other ranks refused" in other
    assert f"more than the model's max_sequence_length={CONFIG.max_sequence_length}" in own
    other, own = run_ranks(2, one_rank_with_a_bad_batch, "no batch")
    assert "1 other ranks refused" in other
    assert "no attribute" in own
