"""Tests of initial values."""

import math

import pytest
import torch
from torch import Generator, Tensor

from models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(attention_bias=True, qk_norm=True)


def _filled(model: Llama, fqn: str, seed: int) -> Tensor:
    tensor = torch.empty_like(model.get_parameter(fqn)).fill_(torch.nan)
    model.init_parameter(fqn, tensor, Generator().manual_seed(seed))
    return tensor


def test_values_depend_on_name_and_generator_only() -> None:
    model = Llama(CONFIG)
    for fqn, _ in model.named_parameters():
        first, again = _filled(model, fqn, 3), _filled(Llama(CONFIG), fqn, 3)
        assert torch.equal(first, again) and first.isfinite().all()


def test_norms_are_one_biases_zero_and_matrices_spread_as_configured() -> None:
    model = Llama(CONFIG)
    for fqn, parameter in model.named_parameters():
        values = _filled(model, fqn, 0)
        if fqn.endswith("bias"):
            assert not values.any()
        elif parameter.dim() == 1:
            assert (values == 1).all()
        else:
            into_residual = fqn.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.02 / math.sqrt(8) if into_residual else 0.02
            assert values.std().item() == pytest.approx(expected, rel=0.06), fqn


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    model = Llama(LlamaConfig())
    for fqn, parameter in model.named_parameters():
        parameter.data = _filled(model, fqn, len(fqn))
    tokens = torch.randint(0, 260, (2, 32))
    assert model(tokens, labels=tokens).item() / 64 == pytest.approx(math.log(260), abs=0.1)


@pytest.mark.parametrize("fqn", ["blocks.0.attention.scale", "blocks.0.gate.weight", "embed.bias"])
def test_a_parameter_that_no_rule_covers_is_refused(fqn: str) -> None:
    with pytest.raises(ValueError, match="no initial values are known"):
        Llama(LlamaConfig(num_layers=1)).init_parameter(fqn, torch.empty(2), Generator())
