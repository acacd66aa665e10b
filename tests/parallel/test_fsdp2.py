"""What `fully_shard` alone leaves silent or opaque: direct calls of forward, evaluation, ties."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import Batch, ParallelConfig, Trained, Unit, build_mesh, parallelize
from tests.parallel.small_model import batches, build, sgd, whole
from tests.ranks import run_ranks

MODEL = LlamaConfig(num_layers=1)
TIED = LlamaConfig(num_layers=1, tied_embeddings=True)


def tokens() -> torch.Tensor:
    return torch.ones(2, 8, dtype=torch.int64)


def test_a_direct_call_of_forward_says_what_is_wrong_and_does_no_harm() -> None:
    for size, config in ((1, ParallelConfig()), (2, ParallelConfig()), (2, ParallelConfig(tp=2))):
        for messages, before, after in run_ranks(size, direct_calls, config):
            for message, name in zip(messages, ("Llama", "embed", "blocks.0", "norm", "head"), strict=True):
                instead = "the whole model" if name == "norm" else "the module itself"
                assert message == (
                    f"the parameters of {name} would be used while sharded; call {instead}, not its .forward()"
                )
            assert before == after


def direct_calls(config: ParallelConfig) -> tuple[list[str], float, float]:
    """Messages of the root, of units, and of a module that lies in the root; the loss of a step before and after."""
    trained, messages = build(config, MODEL), []
    before = trained.forward_backward(batches(trained.mesh, 0)).loss
    hidden = torch.ones(2, 8, 64, dtype=torch.float64)
    root = trained.source
    calls: list[tuple[nn.Module, torch.Tensor, dict[str, Any]]] = [
        (root, tokens(), {}),
        (root.get_submodule("embed"), tokens(), {}),
        (root.get_submodule("blocks.0"), hidden, {"rotary": None, "attention_inputs": None}),
        (root.get_submodule("norm"), hidden, {}),
        (root.get_submodule("head"), hidden, {}),
    ]
    for module, argument, keywords in calls:
        with pytest.raises(RuntimeError) as caught:
            module.forward(argument, **keywords)
        messages.append(str(caught.value))
    return messages, before, trained.forward_backward(batches(trained.mesh, 0)).loss


def test_after_a_failed_forward_a_direct_call_is_still_refused() -> None:
    assert "while sharded" in run_ranks(1, direct_call_after_a_failure)[0]


def direct_call_after_a_failure() -> str:
    trained = build(ParallelConfig(), LlamaConfig(num_layers=1, max_sequence_length=8))
    with pytest.raises(ValueError, match="max_sequence_length=8"):
        trained.model(torch.ones(1, 9, dtype=torch.int64))
    with pytest.raises(RuntimeError) as caught:
        trained.model.forward(tokens())
    return str(caught.value)


@torch.no_grad()
def without_gradients(trained: Trained) -> None:
    trained.model(tokens())


FORWARDS: dict[str, Callable[[Trained], Any]] = {
    "an evaluation": lambda trained: trained.evaluate(batches(trained.mesh, 0)),
    "logits": lambda trained: trained.logits(tokens()),
    "a forward by hand": without_gradients,
    "a step": lambda trained: trained.forward_backward(batches(trained.mesh, 0)),
}


def test_parameters_are_the_sharded_ones_after_any_forward_so_that_an_optimizer_built_by_hand_trains() -> None:
    for changed in run_ranks(2, changed_by_hand_built_optimizers):
        assert changed == dict.fromkeys((*FORWARDS, *(f"{name}, tied" for name in FORWARDS)), True)


def changed_by_hand_built_optimizers() -> dict[str, bool]:
    """Whether a step of an optimizer over `model.parameters()` changes every parameter, by what ran before."""
    changed = {}
    for config, suffix in ((MODEL, ""), (TIED, ", tied")):
        for name, run in FORWARDS.items():
            trained = build(ParallelConfig(strategy="shard_grad_op"), config)
            run(trained)
            optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.5)
            trained.check_optimizer(optimizer)
            before = {fqn: whole(each) for fqn, each in trained.named_parameters().items()}
            trained.forward_backward(batches(trained.mesh, 1))
            optimizer.step()
            after = {fqn: whole(each) for fqn, each in trained.named_parameters().items()}
            changed[name + suffix] = all(not torch.equal(before[fqn], after[fqn]) for fqn in before)
    return changed


def test_an_evaluation_sees_the_values_of_the_last_step() -> None:
    for first, second in run_ranks(2, losses_around_a_step):
        assert second < first - 0.01


def losses_around_a_step() -> tuple[float, float]:
    """The loss before and after a step, where an evaluation lies between backward and step."""
    trained = build(ParallelConfig(strategy="shard_grad_op"), MODEL)
    optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.5)
    micro_batches = batches(trained.mesh, 0)
    trained.forward_backward(micro_batches)
    first = trained.evaluate(micro_batches).loss
    optimizer.step()
    return first, trained.evaluate(micro_batches).loss


TIED_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"data_parallel": "none"}),
    (2, {}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "sequence_parallel": False}),
    (4, {"tp": 2}),
    (4, {"strategy": "hybrid_shard", "dp_replicate": 2}),
]


@pytest.mark.parametrize(("size", "fields"), TIED_LAYOUTS)
def test_tied_embeddings_stay_one_parameter_with_one_optimizer_entry(size: int, fields: dict[str, Any]) -> None:
    for same, names, num_entries, equal in run_ranks(size, ties, fields):
        assert same == [True, True, True]
        assert "embed.weight" in names and "head.weight" not in names
        assert num_entries == len(names) == len(set(names))
        assert equal


def ties(fields: dict[str, Any]) -> tuple[list[bool], list[str], int, bool]:
    """Whether both names are one parameter after parallelize, materialize and a step; names and optimizer entries."""
    config, same = ParallelConfig(**fields), []

    def tied(root: nn.Module) -> bool:
        return root.get_parameter("embed.weight") is root.get_parameter("head.weight")

    with torch.device("meta"):
        model = Llama(TIED)
    same.append(tied(parallelize(model, build_mesh(config), config, llama_plan(TIED)).source))
    trained = build(config, TIED)
    same.append(tied(trained.source))
    optimizer = trained.build_optimizer(sgd)
    trained.forward_backward(batches(trained.mesh, 0))
    optimizer.step()
    trained.backend.reshard(trained.model)
    same.append(tied(trained.source))
    num_entries = sum(len(group["params"]) for group in optimizer.param_groups)
    weights = [whole(trained.source.get_parameter(f"{name}.weight")) for name in ("embed", "head")]
    return same, list(trained.named_parameters()), num_entries, torch.equal(*weights)


@pytest.mark.parametrize("fields", [{}, {"strategy": "shard_grad_op"}, {"tp": 2}, {"tp": 2, "dp_shard": 2}])
def test_logits_whose_gradient_is_taken_keep_the_weights_of_the_head_for_it(fields: dict[str, Any]) -> None:
    config = ParallelConfig(**fields)
    (reference,) = run_ranks(1, gradients_through_logits, ParallelConfig(data_parallel="none"))
    for found in run_ranks(4 if fields.get("dp_shard") else 2, gradients_through_logits, config):
        for fqn, gradient in reference.items():
            torch.testing.assert_close(found[fqn], gradient, rtol=1e-12, atol=1e-15)


def gradients_through_logits(config: ParallelConfig) -> dict[str, torch.Tensor]:
    """Gradients of a loss that a user computes from the logits, between two usual steps."""
    trained = build(config, MODEL)
    trained.forward_backward(batches(trained.mesh, 0))
    for each in trained.named_parameters().values():
        each.grad = None
    (trained.model(tokens()).square().mean() / trained.mesh.degree("dp")).backward()
    gradients = {fqn: whole(each.grad) for fqn, each in trained.named_parameters().items() if each.grad is not None}
    assert len(gradients) == len(trained.named_parameters())
    trained.forward_backward(batches(trained.mesh, 0))
    return gradients


def test_a_unit_over_another_view_is_refused() -> None:
    assert "units can be sharded over fsdp here, not as in" in run_ranks(1, refusal_of_another_view)[0]


def refusal_of_another_view() -> str:
    config = ParallelConfig()
    with torch.device("meta"):
        model = Llama(MODEL)
    plan = replace(llama_plan(MODEL), units=(Unit(modules=("embed",), view="tp"),))
    with pytest.raises(ValueError) as caught:
        parallelize(model, build_mesh(config), config, plan)
    return str(caught.value)


def test_every_parameter_is_sharded_and_freed_between_steps() -> None:
    for local, whole_model in run_ranks(2, elements_held):
        assert local * 2 == whole_model


def elements_held() -> tuple[int, int]:
    trained = build(ParallelConfig(), MODEL)
    trained.forward_backward([Batch.from_tokens(tokens(), tokens())])
    parameters = list(trained.named_parameters().values())
    assert all(isinstance(each, DTensor) for each in parameters)
    return sum(each.to_local().numel() for each in parameters), sum(each.numel() for each in parameters)  # type: ignore[attr-defined]
