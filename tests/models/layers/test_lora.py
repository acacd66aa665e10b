"""Adapters change nothing when new, train alone, and go to the linear maps that are named."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from models.layers.lora import AdaptedLinear, LoraConfig, add_adapters, is_of_adapter
from models.llama import Llama, LlamaConfig, llama_plan
from models.moe import Moe, MoeConfig, moe_plan
from parallel.plan import ParallelPlan, matching

CONFIG = LlamaConfig(num_layers=2, width=32, num_heads=4, num_kv_heads=2, feed_forward_width=48)
TARGETS = ("blocks.*.attention.q_proj", "blocks.1.feed_forward.*_proj")


def adapted(**fields: Any) -> tuple[Llama, ParallelPlan]:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    return model, add_adapters(model, llama_plan(CONFIG), LoraConfig(**{"rank": 4, "targets": TARGETS, **fields}))


def test_the_maps_that_patterns_name_get_an_adapter_and_keep_their_own_names() -> None:
    before = dict(Llama(CONFIG).named_parameters())
    model, plan = adapted()
    named = dict(model.named_parameters())
    new = named.keys() - before.keys()
    assert named.keys() > before.keys()
    maps = [
        "0.attention.q_proj",
        "1.attention.q_proj",
        *(f"1.feed_forward.{each}_proj" for each in ("gate", "up", "down")),
    ]
    assert new == {f"blocks.{each}.adapter.{matrix}.weight" for each in maps for matrix in "ab"}
    assert new == {fqn for fqn in named if is_of_adapter(fqn)}
    assert named["blocks.1.feed_forward.down_proj.adapter.a.weight"].shape == (4, 48)
    assert named["blocks.1.feed_forward.down_proj.adapter.b.weight"].shape == (32, 4)
    plan.check(model)


def test_only_adapters_are_trained() -> None:
    model, _ = adapted()
    assert {fqn for fqn, each in model.named_parameters() if each.requires_grad} == {
        fqn for fqn, _ in model.named_parameters() if is_of_adapter(fqn)
    }


def test_a_new_adapter_changes_nothing_and_then_adds_alpha_over_rank_times_b_a_x() -> None:
    linear = nn.Linear(6, 5, dtype=torch.float64)
    map_, x = AdaptedLinear(linear, LoraConfig(rank=2, alpha=3.0)), torch.randn(7, 6, dtype=torch.float64)
    assert torch.equal(map_(x), linear(x))
    nn.init.normal_(map_.adapter.b.weight)
    merged = linear.weight + 1.5 * map_.adapter.b.weight @ map_.adapter.a.weight
    assert torch.allclose(map_(x), x @ merged.T + linear.bias, rtol=0, atol=1e-14)


def test_an_adapter_has_dtype_and_device_of_its_map() -> None:
    with torch.device("meta"):
        model = Llama(CONFIG).to(torch.float64)
    add_adapters(model, llama_plan(CONFIG), LoraConfig(rank=2))
    assert {(each.dtype, each.is_meta) for each in model.parameters()} == {(torch.float64, True)}


def test_the_plan_splits_an_adapter_as_its_map_is_split_but_never_along_the_rank() -> None:
    styles = adapted()[1].tensor_parallel
    assert styles["blocks.*.attention.q_proj.adapter.a"] == "weight_replicate"
    assert styles["blocks.*.attention.q_proj.adapter.b"] == "weight_colwise"
    assert styles["blocks.*.feed_forward.down_proj.adapter.a"] == "weight_rowwise"
    assert styles["blocks.*.feed_forward.down_proj.adapter.b"] == "weight_replicate"
    assert "blocks.*.attention.o_proj.adapter.a" not in styles


def test_within_a_layer_of_partial_sums_an_adapter_is_split_as_such() -> None:
    config = MoeConfig(num_layers=2, shared_expert_width=32)
    model, shared = Moe(config), "blocks.*.feed_forward.shared_expert"
    plan = add_adapters(model, moe_plan(config), LoraConfig(rank=2, targets=(f"{shared}.*",)))
    for of_map, name, of_matrix in (
        ("up_proj", "a", "partial_replicate"),
        ("up_proj", "b", "partial_colwise"),
        ("down_proj", "a", "partial_rowwise"),
        ("down_proj", "b", "partial_replicate"),
    ):
        fqn = f"blocks.1.feed_forward.shared_expert.{of_map}.adapter.{name}"
        assert [plan.tensor_parallel[key] for key in plan.tensor_parallel if matching(key, {fqn: None})] == [of_matrix]
    assert sum(is_of_adapter(fqn) for fqn, _ in model.named_parameters()) == 2 * 3 * 2
    plan.check(model)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("blocks.*.attention.query",), "matches no module; the model's linear maps are called down_proj, gate_proj"),
        (("q_proj",), "'q_proj' matches no module"),
        ((*TARGETS, "blocks.9.*.q_proj"), "'blocks.9.*.q_proj' matches no module"),
        (("head",), "'head' matches head, which is a LossHead; adapters are for linear maps alone"),
        (("blocks.*.attention",), "which is a Attention"),
        ((), "lora.rank=4 needs lora.targets"),
    ],
)
def test_a_target_that_is_no_linear_map_is_refused_and_nothing_is_changed(
    targets: tuple[str, ...], message: str
) -> None:
    model = Llama(CONFIG)
    before = list(map(repr, model.modules()))
    with pytest.raises(ValueError, match=re.escape(message)):
        add_adapters(model, llama_plan(CONFIG), LoraConfig(rank=4, targets=targets))
    assert list(map(repr, model.modules())) == before
    assert all(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize("fields", [{"rank": -1}, {"rank": True}, {"alpha": 0.0}, {"alpha": float("nan")}])
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"lora.{next(iter(fields))}="):
        LoraConfig(**fields)


def test_no_rank_asks_for_no_adapters() -> None:
    with pytest.raises(ValueError, match="set a rank of at least 1"):
        add_adapters(Llama(CONFIG), llama_plan(CONFIG), LoraConfig())
