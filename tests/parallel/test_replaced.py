"""An optimizer that holds parameters which the model no longer has says so instead of changing nothing."""

from typing import Any

import pytest
import torch
from torch import nn

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import ParallelConfig, Trained, build_mesh, materialize, parallelize
from parallel.replaced import mark_replaced
from tests.parallel.small_model import batches, build, whole
from tests.ranks import run_ranks

MODEL = LlamaConfig(num_layers=1)
OPTIMIZERS: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.SGD, torch.optim.AdamW)
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "sequence_parallel": False}),
]


def real_model() -> Llama:
    model = Llama(MODEL).double()
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            model.init_parameter(fqn, parameter, torch.Generator().manual_seed(len(fqn)))
    return model


def lay_out(model: Llama, config: ParallelConfig) -> Trained:
    return parallelize(model, build_mesh(config), config, llama_plan(MODEL))


def test_an_optimizer_built_before_parallelize_is_refused_at_its_step() -> None:
    for size, fields in LAYOUTS:
        for messages in run_ranks(size, steps_of_early_optimizers, ParallelConfig(**fields)):
            assert len(messages) == len(OPTIMIZERS)
            for message in messages:
                assert "holds 12 parameters that parallelize or materialize has replaced since (embed.weight" in message
                assert "build it after materialize, through trained.build_optimizer" in message


def steps_of_early_optimizers(config: ParallelConfig) -> list[str]:
    messages = []
    for optimizer_class in OPTIMIZERS:
        model = real_model()
        optimizer = optimizer_class(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        trained = lay_out(model, config)
        trained.forward_backward(batches(trained.mesh, 0))
        with pytest.raises(ValueError) as caught:
            optimizer.step()
        messages.append(str(caught.value))
        with pytest.raises(ValueError, match=r"misses 12 trainable parameters .* and holds 12 that are not"):
            trained.check_optimizer(optimizer)
    return messages


def test_an_optimizer_built_on_meta_trains_or_is_refused() -> None:
    for size, fields in ((1, {"data_parallel": "none"}), *LAYOUTS):
        for early, outcome in run_ranks(size, step_of_an_optimizer_over_meta, ParallelConfig(**fields)):
            assert "parameters are still on meta (embed.weight" in early and "call materialize before" in early
            assert outcome == "changed" or "has replaced since (embed.weight" in outcome


def step_of_an_optimizer_over_meta(config: ParallelConfig) -> tuple[str, str]:
    """What build_optimizer says between parallelize and materialize, and what becomes of one built by hand there."""
    with torch.device("meta"):
        model = Llama(MODEL).double()
    trained = lay_out(model, config)
    with pytest.raises(ValueError) as caught:
        trained.build_optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.5))
    optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.5)
    materialize(trained)
    before = {fqn: whole(each) for fqn, each in trained.named_parameters().items()}
    trained.forward_backward(batches(trained.mesh, 0))
    try:
        optimizer.step()
    except ValueError as error:
        return str(caught.value), str(error)
    changed = all(not torch.equal(whole(each), before[fqn]) for fqn, each in trained.named_parameters().items())
    return str(caught.value), "changed" if changed else "unchanged"


def test_an_optimizer_of_another_model_steps_as_ever() -> None:
    assert run_ranks(1, step_beside_a_replaced_model) == [0.5]


def step_beside_a_replaced_model() -> float:
    build(ParallelConfig(), MODEL)
    other = nn.Parameter(torch.ones(()))
    other.grad = torch.ones(())
    torch.optim.SGD([other], lr=0.5).step()
    return other.item()


def test_parameters_that_stay_are_not_marked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept, replaced = model.get_parameter("0.weight"), model.get_parameter("1.weight")
    with mark_replaced(model):
        model[1].register_parameter("weight", nn.Parameter(torch.ones(2, 2)))
    torch.optim.SGD([kept], lr=0.1).step()
    with pytest.raises(ValueError, match=r"holds 1 parameters .*\(1.weight"):
        torch.optim.SGD([kept, replaced], lr=0.1).step()
