"""The trained object gives the model's own parameters and logits, and builds no optimizer that would miss any."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.llama import LlamaConfig
from parallel import Batch, ParallelConfig
from tests.parallel.small_model import batches, build, difference
from tests.ranks import run_ranks

MODEL = LlamaConfig(num_layers=1)
Named = dict[str, nn.Parameter]


def sgd_over(select: Callable[[Named], list[nn.Parameter]]) -> Callable[[Named], torch.optim.Optimizer]:
    return lambda named: torch.optim.SGD(select(named), lr=0.1)


def test_an_optimizer_that_misses_a_parameter_or_holds_a_foreign_one_is_refused() -> None:
    for missing, foreign, frozen in run_ranks(2, refusals):
        assert "misses 1 trainable parameters (norm.weight ...) and holds 0" in missing
        assert "misses 0 trainable parameters" in foreign and "holds 1 that are not this model's" in foreign
        assert frozen == ["norm.weight"]


def refusals() -> tuple[str, str, list[str]]:
    trained = build(ParallelConfig(), MODEL)
    messages = []
    for factory in (
        sgd_over(lambda named: [each for fqn, each in named.items() if fqn != "norm.weight"]),
        sgd_over(lambda named: [*named.values(), nn.Parameter(torch.ones(1))]),
    ):
        with pytest.raises(ValueError) as caught:
            trained.build_optimizer(factory)
        messages.append(str(caught.value))
    for fqn, parameter in trained.named_parameters().items():
        parameter.requires_grad_(fqn == "norm.weight")
    offered: list[str] = []
    trained.build_optimizer(sgd_over(lambda named: offered.extend(named) or list(named.values())))  # type: ignore[func-returns-value]
    return messages[0], messages[1], offered


def test_an_optimizer_over_what_an_unfinished_forward_left_is_refused_and_one_built_then_is_right() -> None:
    for message in run_ranks(2, optimizer_after_an_unfinished_forward):
        assert "that are not this model's; build it after parallelize, through trained.build_optimizer" in message


def optimizer_after_an_unfinished_forward() -> str:
    trained = build(ParallelConfig(strategy="shard_grad_op"), MODEL)
    (batch,) = batches(trained.mesh, 0)
    trained.model(batch.tokens, labels=batch.labels)  # no backward: units stay gathered
    by_hand = torch.optim.SGD(trained.model.parameters(), lr=0.1)
    with pytest.raises(ValueError) as caught:
        trained.check_optimizer(by_hand)
    trained.build_optimizer(sgd_over(lambda named: list(named.values())))
    return str(caught.value)


LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"tp": 2, "loss_parallel": False}],
    4: [{"tp": 4}, {"tp": 2}],
}


def inputs() -> dict[str, Tensor]:
    """Rows of 5 tokens, which neither 2 nor 4 divides, in two documents."""
    positions, document_ids = torch.tensor([[0, 1, 0, 1, 2]] * 2), torch.tensor([[0, 0, 1, 1, 1]] * 2)
    return {"tokens": torch.arange(10).view(2, 5), "positions": positions, "document_ids": document_ids}


def logits_of_layouts(layouts: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for fields in layouts:
        trained = build(ParallelConfig(**fields), MODEL)
        found.append((trained.logits(inputs()["tokens"]), trained.logits(**inputs())))
    return found


def test_logits_of_a_length_that_does_not_divide_are_those_of_one_process_on_every_rank() -> None:
    (reference,) = run_ranks(1, logits_of_layouts, [{"data_parallel": "none"}])[0]
    assert reference[0].shape == (2, 5, MODEL.vocab_size) and not torch.equal(*reference)
    for size, layouts in LAYOUTS.items():
        for found in run_ranks(size, logits_of_layouts, layouts):
            for each in found:
                assert all(difference(*pair) < 1e-13 for pair in zip(each, reference, strict=True))


def test_gradients_start_from_none_in_each_step() -> None:
    first, second, other = run_ranks(1, norms_of_steps)[0]
    assert first == second != other


def norms_of_steps() -> list[float]:
    trained, norms = build(ParallelConfig(), MODEL), []
    for step in (0, 0, 1):
        trained.forward_backward(batches(trained.mesh, step))
        norms.append(trained.clip_gradients(None).item())
    return norms


def test_an_evaluation_leaves_no_gradients() -> None:
    assert run_ranks(2, gradients_after_evaluation) == [[], []]


def gradients_after_evaluation() -> list[str]:
    trained = build(ParallelConfig(), MODEL)
    tokens = torch.ones(2, 8, dtype=torch.int64)
    trained.evaluate([Batch.from_tokens(tokens, tokens)])
    return [fqn for fqn, parameter in trained.named_parameters().items() if parameter.grad is not None]
