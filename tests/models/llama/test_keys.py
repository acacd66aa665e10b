"""Tests of the names in Hugging Face files."""

import pytest
import torch

from models.llama import LLAMA_HUB, Llama, LlamaConfig, to_hub_name


def test_every_parameter_has_a_name_of_its_own() -> None:
    config = LlamaConfig(num_layers=11, attention_bias=True, qk_norm=True)
    with torch.device("meta"):
        model = Llama(config)
    parts = [part for fqn, _ in model.named_parameters() for part in LLAMA_HUB.parts(config, fqn, None)]
    assert len({part.name for part in parts}) == len(dict(model.named_parameters()))
    assert to_hub_name("blocks.10.attention_norm.weight") == "model.layers.10.input_layernorm.weight"
    assert not any(LLAMA_HUB.ignored(part.name) for part in parts)


@pytest.mark.parametrize("name", ["blocks.x.feed_forward.up_proj.weight", "embed.scale", "model.norm.weight", ""])
def test_a_name_of_another_model_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no parameter"):
        to_hub_name(name)


def test_rotary_frequencies_of_old_files_are_ignored() -> None:
    assert LLAMA_HUB.ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
