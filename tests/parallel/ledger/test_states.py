"""What every rank holds at three moments equals what the ledger predicts, to the byte."""

from typing import Any

import pytest
import torch
from torch import nn

from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.plan import llama_plan
from models.moe import Moe, MoeConfig
from parallel import ParallelConfig, Precision, Sharding, Trained
from parallel.layout import resolve
from parallel.ledger.live import LiveMeter
from parallel.ledger.optimizer_memory import OPTIMIZERS, kernels_of, optimizer_memory, step_temporaries
from parallel.ledger.parts import model_parts
from parallel.ledger.states import Moments, predict_states
from parallel.ledger.textbook import state_forms
from parallel.ledger.trace import MemoryMeter
from recipes.ledger.optimizers import optimizer_factory
from recipes.optimizer import OptimizerConfig
from tests.models.moe import small_moe
from tests.parallel.small_model import adamw, batches, build
from tests.ranks import run_ranks

BF16 = Precision(compute="bfloat16", reduce="float32")
VIEWS = ("fsdp", "dp_replicate", "loss", "tp")


def measured(fields: dict[str, Any], model: dict[str, Any]) -> tuple[Moments, Moments]:
    """What this rank holds, and what was predicted."""
    config = LlamaConfig(**{"num_layers": 2, **model})
    trained = build(ParallelConfig(**fields), config, dtype=torch.float32)
    with torch.device("meta"):
        whole = Llama(config)
    return moments(trained, whole)


def measured_experts(fields: dict[str, Any], model: dict[str, Any]) -> tuple[Moments, Moments]:
    """The same of a model with experts."""
    trained = small_moe.build(ParallelConfig(**fields), model, dtype=torch.float32)
    with torch.device("meta"):
        whole = Moe(MoeConfig(**{"num_layers": 2, **model}))
    return moments(trained, whole)


def moments(trained: Trained, whole: nn.Module, name: str = "adamw") -> tuple[Moments, Moments]:
    """What this rank holds in a step, and what was predicted."""
    make = adamw if name == "adamw" else optimizer_factory(name, OptimizerConfig())
    mine, optimizer = batches(trained.mesh, 0), trained.build_optimizer(make)
    parts = model_parts(whole, trained.config, trained.plan)
    predicted = predict_states(parts, {view: trained.mesh.coordinate(view) for view in VIEWS}, name)
    trained.forward_backward(mine)
    optimizer.step()
    optimizer.zero_grad()
    meter = LiveMeter(trained, optimizer)
    seen = [meter.measure()]
    trained.model.register_forward_hook(lambda *_: seen.append(meter.measure()))
    trained.forward_backward(mine)
    seen.append(meter.measure())
    rest, after_forward, after_backward = seen
    return Moments(rest=rest, after_forward=after_forward, after_backward=after_backward), predicted


FSDP1 = {"data_parallel": "fsdp1"}
LAST = Sharding(keep_last_unit=True)
HYBRID = {"dp_replicate": 2, "strategy": "hybrid_shard"}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "full_shard": (2, {}, {}),
    "full_shard with rows that do not divide": (3, {"sharding": Sharding(keep_last_unit=True)}, {"vocab_size": 259}),
    "full_shard in bf16, tied embeddings in the root": (2, {"precision": BF16}, {"tied_embeddings": True}),
    "shard_grad_op with rows that do not divide": (3, {"strategy": "shard_grad_op"}, {}),
    "shard_grad_op in bf16": (2, {"strategy": "shard_grad_op", "precision": BF16}, {}),
    "hybrid_shard": (4, HYBRID, {}),
    "hybrid_shard_zero2 in bf16": (4, HYBRID | {"strategy": "hybrid_shard_zero2", "precision": BF16}, {}),
    "hybrid_shard_zero2 of one rank a group": (2, HYBRID | {"strategy": "hybrid_shard_zero2"}, {}),
    "no_shard": (2, {"strategy": "no_shard"}, {}),
    "no_shard in bf16": (2, {"strategy": "no_shard", "precision": BF16}, {}),
    "ddp": (2, {"data_parallel": "ddp"}, {}),
    "ddp in bf16": (2, {"data_parallel": "ddp", "precision": BF16}, {}),
    "zero1 with rows that do not divide": (3, {"data_parallel": "zero1"}, {}),
    "tp": (2, {"tp": 2}, {"vocab_size": 259, "attention_bias": True}),
    "tp in bf16": (2, {"tp": 2, "precision": BF16, "strategy": "shard_grad_op"}, {}),
    "resharding to pairs": (4, {"sharding": Sharding(reshard_group=2)}, {}),
    "full_shard x tp": (4, {"dp_shard": 2, "tp": 2}, {"vocab_size": 259}),
    "ddp x tp": (4, {"data_parallel": "ddp", "tp": 2}, {}),
    "fsdp1 with padding": (3, FSDP1, {"vocab_size": 261}),
    "fsdp1 in bf16, last unit kept": (2, FSDP1 | {"precision": BF16, "sharding": LAST}, {"vocab_size": 261}),
    "fsdp1 shard_grad_op": (2, FSDP1 | {"strategy": "shard_grad_op", "precision": BF16}, {}),
    "fsdp1 hybrid_shard": (4, FSDP1 | HYBRID, {"vocab_size": 261}),
    "fsdp1 hybrid_shard_zero2": (4, FSDP1 | HYBRID | {"strategy": "hybrid_shard_zero2"}, {}),
    "fsdp1 no_shard": (2, FSDP1 | {"strategy": "no_shard", "precision": BF16}, {"vocab_size": 261}),
    "fsdp1 x tp": (4, FSDP1 | {"dp_shard": 2, "tp": 2}, {"vocab_size": 261}),
    "one process": (1, {"data_parallel": "none", "precision": BF16}, {}),
}


EP_CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "three experts on two ranks": (4, {"ep": 2}, {"num_experts": 6}),
    "one expert on two ranks, kept, in bf16": (
        4,
        {"ep": 2, "strategy": "shard_grad_op", "precision": BF16},
        {"num_experts": 2, "num_experts_per_token": 1},
    ),
    "ep x tp": (4, {"dp_shard": 2, "ep": 2, "tp": 2}, {"shared_expert_width": 24}),
    "others kept by pairs": (4, {"ep": 2, "sharding": Sharding(reshard_group=2)}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EP_CASES)
def test_predicted_states_of_experts_equal_the_measured_ones(name: str) -> None:
    for found, predicted in run_ranks(EP_CASES[name][0], measured_experts, *EP_CASES[name][1:]):
        assert found == predicted


@pytest.mark.parametrize("name", CASES)
def test_predicted_states_equal_the_measured_ones(name: str) -> None:
    for measured_moments, predicted in run_ranks(CASES[name][0], measured, *CASES[name][1:]):
        assert measured_moments == predicted


def measured_optimizers(fields: dict[str, Any]) -> list[tuple[Moments, Moments]]:
    """The same with every optimizer that the ledger knows, one after the other."""
    config = LlamaConfig(num_layers=1, vocab_size=259)
    with torch.device("meta"):
        whole = Llama(config)
    return [moments(build(ParallelConfig(**fields), config, dtype=torch.float32), whole, name) for name in OPTIMIZERS]


@pytest.mark.parametrize("backend", ["fsdp2", "zero1"])
def test_the_state_of_every_known_optimizer_equals_the_predicted_one(backend: str) -> None:
    for pairs in run_ranks(3, measured_optimizers, {"data_parallel": backend}):
        assert all(found == predicted for found, predicted in pairs)
        assert len({found.rest.optimizer_state for found, _ in pairs}) > 4


@pytest.mark.parametrize("kernels", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_what_a_step_of_an_optimizer_holds_for_a_moment_is_predicted(kernels: Any, decay: float) -> None:
    shapes = ((30, 20), (500,), (70, 20), (30, 20), (600,))
    config = OptimizerConfig(weight_decay=decay, implementation=kernels)
    for name in OPTIMIZERS:
        if kernels == "fused" and not optimizer_memory(name).has_fused:
            continue
        parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = optimizer_factory(name, config)({str(index): each for index, each in enumerate(parameters)})
        in_order = [each for group in optimizer.param_groups for each in group["params"]]
        sizes = [(each.nbytes, each.ndim > 1) for each in in_order]
        meter = MemoryMeter(torch.device("cpu"))
        with meter:
            for each in parameters:
                each.grad = torch.ones_like(each)
            optimizer.step()
            meter.start()
            before = meter.live_bytes
            optimizer.step()
        above = step_temporaries(name, kernels, decays=decay > 0, sizes=sizes)
        # Single numbers come and go too.
        assert meter.peak_bytes - before == pytest.approx(above, abs=32), name


def test_an_optimizer_that_the_ledger_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="does not know optimizer 'adafactor'; legal: adamw, adam, sgd"):
        optimizer_factory("adafactor", OptimizerConfig())
    with pytest.raises(ValueError, match="torch has no fused rmsprop"):
        kernels_of("rmsprop", "fused")


# Not those that textbooks do not tell apart: units kept or regrouped, embeddings in the root.
FORMS = [
    name for name, (_, fields, _) in CASES.items() if not {"tp", "sharding"} & fields.keys() and "tied" not in name
]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_the_forms_of_textbooks_give_what_is_predicted_but_for_padding_and_small_units(name: str, frozen: bool) -> None:
    world_size, fields, model = CASES[name]
    # So deep that no unit counts for much.
    config = LlamaConfig(**{**model, "num_layers": 40, "vocab_size": 64})
    with torch.device("meta"):
        whole = Llama(config)
    for fqn, parameter in whole.named_parameters():
        # All parameters of a unit, as flattened ones have gradients of all if any is trained.
        parameter.requires_grad_(not (frozen and fqn.startswith(("blocks.1", "blocks.2"))))
    parts = model_parts(whole, resolve(ParallelConfig(**fields), world_size), llama_plan(config))
    predicted = predict_states(parts, dict.fromkeys(VIEWS, 0))
    forms = state_forms(parts)
    for form, held in zip(forms, (predicted.rest, predicted.after_forward, predicted.after_backward), strict=True):
        exact = held.parameters + held.unsharded + held.gradients + held.optimizer_state
        assert form.num_bytes == pytest.approx(exact, rel=0.03), form.text
