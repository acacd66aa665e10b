"""AdamW and its groups."""

from typing import Literal

import pytest
import torch
from torch import nn

from recipes.optimizer import OptimizerConfig, adamw_factory, decay_groups


def _model() -> nn.Module:
    model = nn.Module()
    model.embed = nn.Embedding(6, 4)
    model.norm = nn.RMSNorm(4)
    model.proj = nn.Linear(4, 4, bias=True)
    model.head = nn.Linear(4, 6, bias=False)
    model.head.weight = model.embed.weight
    return model


def test_matrices_decay_norms_and_biases_do_not_and_a_tied_parameter_counts_once() -> None:
    model = _model()
    matrices, vectors = decay_groups(dict(model.named_parameters(remove_duplicate=False)), 0.1)
    assert matrices["weight_decay"] == 0.1
    assert vectors["weight_decay"] == 0.0
    assert [id(each) for each in matrices["params"]] == [
        id(model.get_parameter("embed.weight")),
        id(model.get_parameter("proj.weight")),
    ]
    assert [each.shape for each in vectors["params"]] == [(4,), (4,)]


def test_frozen_parameters_are_in_no_group_and_no_group_is_empty() -> None:
    model = _model()
    model.get_parameter("embed.weight").requires_grad_(False)
    model.get_parameter("proj.weight").requires_grad_(False)
    (vectors,) = decay_groups(dict(model.named_parameters()), 0.1)
    assert vectors["weight_decay"] == 0.0
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="none of 4 parameters is trainable"):
        decay_groups(dict(model.named_parameters()), 0.1)


def test_a_step_without_gradient_signal_decays_matrices_only() -> None:
    model = _model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = OptimizerConfig(lr=0.5, weight_decay=0.1)
    optimizer = adamw_factory(config)(dict(model.named_parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize(
    ("implementation", "fused", "foreach"),
    [(None, True, None), ("fused", True, False), ("foreach", False, True), ("loop", False, False)],
)
def test_the_implementation_is_the_one_asked_for_and_else_fused(
    implementation: Literal["fused", "foreach", "loop"] | None, fused: bool | None, foreach: bool | None
) -> None:
    config = OptimizerConfig(implementation=implementation, lr=0.25, betas=(0.5, 0.75), eps=1e-4)
    optimizer = adamw_factory(config)(dict(_model().named_parameters()))
    assert optimizer.defaults["fused"] is fused
    assert optimizer.defaults["foreach"] is foreach
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all((g["lr"], g["betas"], g["eps"]) == (0.25, (0.5, 0.75), 1e-4) for g in optimizer.param_groups)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", True),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("implementation", "sparse"),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        OptimizerConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "global_batch", "expected"),
    [("linear", 128, 0.04), ("linear", 16, 0.005), ("sqrt", 128, 0.02), ("sqrt", 32, 0.01), (None, 128, 0.01)],
)
def test_the_learning_rate_follows_the_batch_as_the_rule_says(
    rule: Literal["linear", "sqrt"] | None, global_batch: int, expected: float
) -> None:
    config = OptimizerConfig(lr=0.01, lr_scaling=rule, lr_reference_batch=32 if rule else None)
    scaled = config.at_batch(global_batch)
    assert scaled.lr == pytest.approx(expected)
    # Once is enough.
    assert scaled.at_batch(global_batch) == scaled
    optimizer = adamw_factory(scaled)(dict(_model().named_parameters()))
    assert [(group["name"], group["lr"]) for group in optimizer.param_groups] == [
        ("matrices", pytest.approx(expected)),
        ("vectors", pytest.approx(expected)),
    ]


def test_a_rule_needs_its_reference_and_the_reference_a_rule() -> None:
    for values in ({"lr_scaling": "linear"}, {"lr_reference_batch": 32}):
        with pytest.raises(ValueError, match="need each other"):
            OptimizerConfig(**values)
    with pytest.raises(ValueError, match="unknown lr_scaling 'cubic'; legal: linear, sqrt"):
        OptimizerConfig(lr_scaling="cubic", lr_reference_batch=32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr_reference_batch=0 must be at least 1"):
        OptimizerConfig(lr_scaling="sqrt", lr_reference_batch=0)
