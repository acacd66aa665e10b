"""Tests that our models compute what transformers computes with the same weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from models.llama import Llama, LlamaConfig, RotaryScaling, to_hub_name
from parallel.batch import IGNORE_INDEX

SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Architecture in transformers, our fields, their fields that say the same
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama2": ("Llama", {"num_kv_heads": 6}, {}),
    "llama3": ("Llama", {"rope_theta": 500_000.0}, {}),
    "llama3.1": ("Llama", {"rope_scaling": RotaryScaling(original_sequence_length=64), "rope_theta": 500.0}, {}),
    "llama3.2": ("Llama", {"tied_embeddings": True, "rope_scaling": RotaryScaling(original_sequence_length=64)}, {}),
    "smollm2": (
        "Llama",
        {"tied_embeddings": True, "rope_theta": 100_000.0, "width": 36, "num_heads": 9, "num_kv_heads": 3},
        {},
    ),
    "mistral": ("Mistral", {"head_dim": 8}, {"sliding_window": None}),
    "qwen2": ("Qwen2", {"attention_bias": True, "norm_eps": 1e-6}, {}),
    "qwen3": ("Qwen3", {"qk_norm": True, "head_dim": 10, "norm_eps": 1e-6}, {}),
}


def _config(fields: dict[str, Any]) -> LlamaConfig:
    shape: dict[str, Any] = {"width": 24, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
    return LlamaConfig(num_layers=2, feed_forward_width=40, vocab_size=53, **shape | fields)


def _theirs(architecture: str, config: LlamaConfig, fields: dict[str, Any]) -> nn.Module:
    scaling = {"rope_type": "default"} if config.rope_scaling is None else SCALED
    their_config = getattr(transformers, f"{architecture}Config")(
        num_hidden_layers=config.num_layers,
        hidden_size=config.width,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.shape.head_dim,
        intermediate_size=config.feed_forward_width,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_sequence_length,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied_embeddings,
        rope_parameters=scaling | {"rope_theta": config.rope_theta},
        **fields,
    )
    model: nn.Module = getattr(transformers, f"{architecture}ForCausalLM")(their_config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases away from 1 and 0, matrices large enough that attention is not uniform.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1))
    return model


def _largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_those_of_transformers(variant: str) -> None:
    architecture, ours, others = VARIANTS[variant]
    config = _config(ours)
    theirs = _theirs(architecture, config, others)
    model = Llama(config)
    their_parameters = dict(theirs.named_parameters())
    fqns = {to_hub_name(fqn): fqn for fqn, _ in model.named_parameters()}
    assert set(fqns) == set(their_parameters)
    with torch.no_grad():
        for name, fqn in fqns.items():
            model.get_parameter(fqn).copy_(their_parameters[name])

    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, config.vocab_size, (2, 2, 150), generator=generator)
    labels[0, :20] = IGNORE_INDEX
    their_logits = theirs(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(their_logits.flatten(0, 1), labels.flatten(), reduction="sum").div(280).backward()
    assert _largest_difference(model(tokens), their_logits) < 1e-5
    model(tokens, labels=labels).div(280).backward()
    for name, fqn in fqns.items():
        gradient, theirs_gradient = model.get_parameter(fqn).grad, their_parameters[name].grad
        assert gradient is not None and theirs_gradient is not None
        assert _largest_difference(gradient, theirs_gradient) < 1e-5, fqn
