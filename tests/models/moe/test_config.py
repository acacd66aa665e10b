"""Tests of shapes and presets, and of what config.json of Hugging Face folders says of them."""

from typing import Any

import pytest
import torch

from models.moe import MOE_HUB, MOE_PRESETS, Moe, MoeConfig

VARIANTS: list[dict[str, Any]] = [
    {},
    {"shared_expert_width": 24, "balance_rate": 0.1, "tied_embeddings": True},
    {"dense_layers": (0, 2), "num_experts": 5, "qk_norm": True, "attention_bias": True},
]
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "output_router_logits": False,
}


@pytest.mark.parametrize("fields", VARIANTS)
def test_parameters_are_counted(fields: dict[str, Any]) -> None:
    config = MoeConfig(**fields)
    with torch.device("meta"):
        model = Moe(config)
    assert config.num_parameters == sum(each.numel() for each in model.parameters())


def test_presets_have_the_published_numbers_of_parameters() -> None:
    numbers = {name: MoeConfig.preset(name).num_parameters for name in MOE_PRESETS}
    assert numbers["mixtral-8x7b"] == 46_702_792_704
    assert numbers["qwen3-30b-a3b"] == 30_532_122_624
    assert MoeConfig.preset("debug", num_experts=4) == MoeConfig(num_experts=4)
    with pytest.raises(ValueError, match="unknown preset 'mixtral'; legal: debug, mixtral-8x7b"):
        MoeConfig.preset("mixtral")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, "num_experts=0 must be positive"),
        ({"num_experts_per_token": 9}, "num_experts_per_token=9 is more than num_experts=8"),
        ({"dense_layers": (4,)}, r"dense_layers=\(4,\) must be different ones of 0 to 3"),
        ({"dense_layers": (1, 1)}, "must be different ones"),
        ({"router_score": "relu"}, "unknown router_score 'relu'; legal: softmax, sigmoid"),
        ({"balance_rate": -1.0}, "balance_rate=-1.0 must not be negative"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=8"),
    ],
)
def test_what_is_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoeConfig(**fields)


def test_a_mixtral_is_read() -> None:
    config = MOE_HUB.from_config(MIXTRAL)
    assert config == MoeConfig(
        num_layers=3,
        feed_forward_width=96,
        max_sequence_length=512,
        rope_theta=1e6,
        num_experts=6,
        num_experts_per_token=3,
        expert_width=96,
        balance_loss=0.02 * 3 / 3,
    )


@pytest.mark.parametrize(
    "config",
    [
        MoeConfig(feed_forward_width=64, balance_loss=0.5),
        MoeConfig(qk_norm=True, dense_layers=(1, 3), normalize_top_k=False, balance_loss=0.25),
        MoeConfig(qk_norm=True, head_dim=10, tied_embeddings=True),
    ],
)
def test_a_config_is_the_same_after_export_and_import(config: MoeConfig) -> None:
    assert MOE_HUB.from_config(MOE_HUB.to_config(config)) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1; built: 0"),
        ({"num_local_experts": None}, "lacks num_local_experts"),
        ({"num_experts_per_tok": None}, "lacks num_experts_per_tok"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
        ({"architectures": ["MixtralModel"]}, "built: MixtralForCausalLM"),
        ({"sliding_window": 128}, "sliding_window=128"),
    ],
)
def test_a_config_that_asks_for_more_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MOE_HUB.from_config(MIXTRAL | values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shared_expert_width": 8}, "MixtralForCausalLM cannot say shared_expert_width=8"),
        ({"router_score": "sigmoid", "qk_norm": True}, "Qwen3MoeForCausalLM cannot say router_score='sigmoid'"),
        ({"dense_layers": (1,)}, "cannot say dense_layers"),
        ({"balance_rate": 0.1}, "cannot say balance_rate"),
    ],
)
def test_what_no_class_of_transformers_computes_is_not_exported(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MOE_HUB.to_config(MoeConfig(**fields))
