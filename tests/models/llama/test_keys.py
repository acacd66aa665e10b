"""Tests of the names in Hugging Face files."""

import pytest
import torch

from models.llama import Llama, LlamaConfig, from_hub_name, to_hub_name


def test_every_parameter_keeps_its_name_there_and_back() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig(num_layers=11, attention_bias=True, qk_norm=True))
    fqns = [fqn for fqn, _ in model.named_parameters()]
    names = [to_hub_name(fqn) for fqn in fqns]
    assert len(set(names)) == len(fqns) and [from_hub_name(name) for name in names] == fqns
    assert to_hub_name("blocks.10.attention_norm.weight") == "model.layers.10.input_layernorm.weight"


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv", "model.layers.x.mlp.up_proj.weight", "embed.weight", ""]
)
def test_a_name_of_another_model_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no parameter"):
        from_hub_name(name)


def test_rotary_frequencies_of_old_files_are_no_parameter_and_no_error() -> None:
    assert from_hub_name("model.layers.0.self_attn.rotary_emb.inv_freq") is None
