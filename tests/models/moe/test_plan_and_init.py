"""Tests of what a model with experts declares about itself, and of its initial values."""

import math

import pytest
import torch
from torch import Generator, Tensor
from torch.utils.flop_counter import FlopCounterMode

from models.moe import Moe, MoeConfig, moe_plan

CONFIG = MoeConfig(qk_norm=True, dense_layers=(1,), shared_expert_width=32, balance_rate=0.1)


def test_the_plan_fits_the_model_and_experts_lie_in_the_unit_of_their_block() -> None:
    model, plan = Moe(CONFIG), moe_plan(CONFIG)
    plan.check(model)
    assert plan.shape == CONFIG.shape
    modules = [fqn for unit in plan.units for fqn in unit.modules]
    experts = [fqn for fqn, _ in model.named_parameters() if ".experts." in fqn]
    assert experts and all(fqn.rpartition(".feed_forward")[0] in modules for fqn in experts)


def test_the_cost_of_a_block_is_what_the_matmuls_of_a_token_take() -> None:
    model = Moe(CONFIG).double()
    model.embed = model.norm = model.head = None
    blocks = model.blocks
    for index, block in enumerate(moe_plan(CONFIG).blocks):
        model.blocks = torch.nn.ModuleDict({str(index): blocks[str(index)]})
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(1, 5, CONFIG.width, dtype=torch.float64))
        counts = counter.get_flop_counts()["Global"]
        linear = sum(count for op, count in counts.items() if "mm" in str(op) and "bmm" not in str(op))
        assert linear / 5 == block.cost


def _filled(model: Moe, fqn: str) -> Tensor:
    tensor = torch.empty_like(model.get_parameter(fqn)).fill_(torch.nan)
    model.init_parameter(fqn, tensor, Generator().manual_seed(3))
    return tensor


def test_values_depend_on_name_and_generator_only_and_spread_as_configured() -> None:
    model = Moe(CONFIG)
    for fqn, parameter in model.named_parameters():
        values = _filled(model, fqn)
        assert torch.equal(values, _filled(Moe(CONFIG), fqn))
        if fqn.endswith("selection_bias"):
            assert not values.any()
        elif parameter.dim() == 1:
            assert (values == 1).all()
        else:
            into_residual = "o_proj" in fqn or "down_proj" in fqn
            expected = 0.02 / math.sqrt(8) if into_residual else 0.02
            # Ten standard deviations of the estimate.
            assert values.std().item() == pytest.approx(expected, rel=7 / math.sqrt(values.numel())), fqn


def test_a_parameter_that_no_rule_covers_is_refused() -> None:
    with pytest.raises(ValueError, match="no initial values are known"):
        Moe(CONFIG).init_parameter("blocks.0.feed_forward.router.scale", torch.empty(2), Generator())
