"""Tests of the shape of LLaMA-style models."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.llama import PRESETS, Llama, LlamaConfig
from parallel.plan import ModelShape

# In the model cards and papers: Touvron et al. 2023, Grattafiori et al. 2024, Hugging Face for the small ones.
PUBLISHED = {
    "smollm2-135m": "134.5M",
    "llama2-7b": "6.738B",
    "llama2-13b": "13.016B",
    "llama2-70b": "68.977B",
    "llama3.1-8b": "8.030B",
    "llama3.1-70b": "70.554B",
    "llama3.1-405b": "405.853B",
    "llama3.2-1b": "1.236B",
    "llama3.2-3b": "3.213B",
}


@pytest.mark.parametrize("name", PRESETS)
def test_the_closed_form_counts_the_parameters_of_the_model(name: str) -> None:
    config = LlamaConfig.preset(name)
    with torch.device("meta"):
        model = Llama(config)
    assert config.num_parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("fields", [{"attention_bias": True}, {"qk_norm": True, "head_dim": 6}, {"num_kv_heads": 1}])
def test_the_closed_form_counts_the_parameters_of_every_variant(fields: dict[str, Any]) -> None:
    config = LlamaConfig(**fields)
    assert config.num_parameters == sum(each.numel() for each in Llama(config).parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    count = LlamaConfig.preset(name).num_parameters
    assert (f"{count / 1e9:.3f}B" if count >= 1e9 else f"{count / 1e6:.1f}M") == PUBLISHED[name]


def test_every_preset_of_a_published_model_has_a_count_to_hold_it_against() -> None:
    assert set(PRESETS) == set(PUBLISHED) | {"debug"}


def test_preset_debug_has_the_shape_that_layouts_are_listed_for() -> None:
    assert LlamaConfig.preset("debug").shape == ModelShape(
        num_layers=4,
        width=64,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        feed_forward_width=176,
        vocab_size=260,
        max_sequence_length=2048,
    )


def test_overrides_of_a_preset_are_taken() -> None:
    config = LlamaConfig.preset("debug", width=128, tied_embeddings=True)
    assert (config.width, config.shape.head_dim, config.shape.tied_embeddings) == (128, 16, True)


def test_a_head_dim_that_is_not_given_follows_the_width() -> None:
    assert replace(LlamaConfig(), width=128).shape.head_dim == 16


def test_an_unknown_preset_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'llama4'; legal: debug, smollm2-135m, .*llama3\.2-3b"):
        LlamaConfig.preset("llama4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be positive"),
        ({"num_kv_heads": 3}, r"num_kv_heads=3 must divide num_heads=8; legal: \[1, 2, 4, 8\]"),
        ({"width": 60}, "num_heads=8 must divide width=60"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be positive"),
    ],
)
def test_impossible_shapes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**fields)
