"""Tests of what a LLaMA-style model declares about itself."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.llama import Llama, LlamaConfig, llama_plan


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_plan_fits_the_model(tied: bool, qk_norm: bool) -> None:
    config = LlamaConfig(tied_embeddings=tied, qk_norm=qk_norm)
    plan = llama_plan(config)
    plan.check(Llama(config))
    assert plan.shape == config.shape


def test_a_plan_for_another_model_does_not_fit() -> None:
    with pytest.raises(ValueError, match="matches no module"):
        llama_plan(LlamaConfig(qk_norm=True)).check(Llama(LlamaConfig()))
    with pytest.raises(ValueError, match="different parameters"):
        llama_plan(LlamaConfig(tied_embeddings=True)).check(Llama(LlamaConfig()))


@pytest.mark.parametrize("tied", [False, True])
def test_outside_the_units_are_the_last_norm_and_tied_embeddings(tied: bool) -> None:
    config = LlamaConfig(tied_embeddings=tied)
    plan = llama_plan(config)
    modules = tuple(fqn + "." for unit in plan.units for fqn in unit.modules)
    left = {fqn for fqn, _ in Llama(config).named_parameters() if not fqn.startswith(modules)}
    assert left == ({"norm.weight", "embed.weight"} if tied else {"norm.weight"})


def test_the_cost_of_a_block_is_what_its_matmuls_take() -> None:
    config = LlamaConfig(num_layers=1, head_dim=10)
    with torch.device("meta"):
        model = Llama(config)
    model.embed = model.norm = model.head = None
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 5, config.width, device="meta"))
    flops = counter.get_flop_counts()
    linear = sum(count for op, count in flops["Global"].items() if "mm" in str(op) and "bmm" not in str(op))
    assert linear / 5 == llama_plan(config).blocks[0].cost
