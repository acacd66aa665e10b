"""Which modules become units, by size, by a predicate, as a whole."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from models.llama import Llama, LlamaConfig, llama_plan
from models.moe import Moe, MoeConfig, moe_plan
from parallel import ParallelConfig, Sharding, Unit, build_mesh, materialize, parallelize, units_by_size, units_where
from parallel.units import choose_units, with_expert_units
from tests.parallel.small_model import adamw, batches, build
from tests.ranks import run_ranks

CONFIG = LlamaConfig(num_layers=2)


def meta_model(config: LlamaConfig = CONFIG) -> Llama:
    with torch.device("meta"):
        return Llama(config)


def names(units: tuple[Unit, ...]) -> list[str]:
    return [fqn for unit in units for fqn in unit.modules]


def test_by_size_a_module_is_a_unit_once_it_holds_enough() -> None:
    # A block has 46,208 parameters, the embedding and the head 16,640 each.
    model = meta_model()
    assert names(units_by_size(model, 40_000)) == ["blocks.0", "blocks.1"]
    assert names(units_by_size(model, 16_640)) == [
        "embed",
        "blocks.0.feed_forward",
        "blocks.1.feed_forward",
        "head",
    ]
    assert names(units_by_size(model, 10_000_000)) == []


def test_parameters_of_inner_units_do_not_count_again() -> None:
    # Gate, up and down have 11,264 each and become units; what is left of a block is 12,416.
    found = names(units_by_size(meta_model(), 11_000))
    assert "blocks.0.feed_forward.gate_proj" in found
    assert "blocks.0.feed_forward" not in found
    assert "blocks.0.attention" in found
    assert "blocks.0" not in found


def test_by_size_modules_with_tied_parameters_stay_in_the_root() -> None:
    config = LlamaConfig(num_layers=2, tied_embeddings=True)
    found = names(units_by_size(meta_model(config), 10_000, tied=llama_plan(config).tied))
    assert "embed" not in found
    assert "head" not in found
    assert "blocks.1.attention" in found


def test_a_container_without_forward_is_never_a_unit() -> None:
    assert "blocks" not in names(units_by_size(meta_model(), 1))


def test_a_predicate_picks_units_and_inner_ones_come_first() -> None:
    picked = units_where(meta_model(), lambda fqn, module: fqn == "blocks.0" or isinstance(module, nn.Embedding))
    assert names(picked) == ["embed", "blocks.0"]
    nested = units_where(meta_model(), lambda fqn, module: fqn in ("blocks.0", "blocks.0.attention"))
    assert names(nested) == ["blocks.0.attention", "blocks.0"]


def test_a_predicate_that_picks_a_container_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['blocks'\] are containers without a forward"):
        units_where(meta_model(), lambda fqn, module: fqn == "blocks")


def test_the_config_chooses_between_plan_size_and_the_whole_model() -> None:
    model, plan = meta_model(), llama_plan(CONFIG)
    assert choose_units(model, plan, Sharding()) == plan.units
    assert choose_units(model, plan, Sharding(units="model")) == ()
    by_size = choose_units(model, plan, Sharding(units="size", unit_min_parameters=40_000))
    assert names(by_size) == ["blocks.0", "blocks.1"]


def test_nested_units_from_a_predicate_train_like_the_plans_units() -> None:
    for nested, plain in run_ranks(2, losses_of_nested_and_plain_units):
        assert nested == pytest.approx(plain, rel=1e-13)


def losses_of_nested_and_plain_units() -> tuple[list[float], list[float]]:
    config = ParallelConfig()
    mesh = build_mesh(config)
    model = meta_model().double()
    units = units_where(model, lambda fqn, module: fqn.endswith(("attention", "blocks.0", "blocks.1", "head")))
    nested = parallelize(model, mesh, config, replace(llama_plan(CONFIG), units=units))
    materialize(nested)
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == len(units) + 1
    losses: list[list[float]] = []
    for trained in (nested, build(config)):
        optimizer = trained.build_optimizer(adamw)
        losses.append([])
        for step in range(3):
            losses[-1].append(trained.forward_backward(batches(trained.mesh, step)).loss)
            optimizer.step()
    return losses[0], losses[1]


def test_experts_that_ranks_share_are_units_of_their_own_before_the_unit_around_them() -> None:
    config = MoeConfig(num_layers=2, dense_layers=(0,))
    with torch.device("meta"):
        model = Moe(config)
    plan, experts = moe_plan(config), "blocks.1.feed_forward.experts"
    own = Unit(modules=(experts,), view="expert_fsdp")
    for units in (plan.units, (), units_by_size(model, 5000), (Unit(modules=("norm", experts, "head")),)):
        found = with_expert_units(model, plan, units)
        assert [unit for unit in found if experts in unit.modules] == [own]
        assert [name for name in names(found) if name != experts] == [name for name in names(units) if name != experts]
    assert names(with_expert_units(model, plan, plan.units)) == ["embed", "blocks.0", experts, "blocks.1", "head"]
