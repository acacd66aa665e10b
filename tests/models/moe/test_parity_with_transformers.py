"""Tests that our models with experts compute what transformers computes with the same weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from models.moe import MOE_HUB, Moe, MoeConfig
from parallel.batch import IGNORE_INDEX
from tests.models.moe.small_moe import part_of_file, part_of_parameter

# Class in transformers, and fields of its config.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20}),
    "mixtral, aligned": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen3-moe, not normalized": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "qwen3-moe, one expert a token": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 1}),
    "qwen3-moe, some dense": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [2]}),
    "qwen3-moe, every second": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 4, "decoder_sparse_step": 2}),
}


def _theirs(architecture: str, fields: dict[str, Any], num_layers: int = 3) -> nn.Module:
    moe = {} if architecture == "Mixtral" else {"moe_intermediate_size": 12, "head_dim": 10}
    config = getattr(transformers, f"{architecture}Config")(
        **{
            "num_hidden_layers": num_layers,
            "hidden_size": 24,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 40,
            "vocab_size": 53,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_window": None,
            **moe,
            **fields,
        }
    )
    model: nn.Module = getattr(transformers, f"{architecture}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms away from 1, matrices large enough that neither attention nor routing is uniform.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1))
    return model


def _ours(theirs: Any, **overrides: Any) -> Moe:
    """The same model, its config and its weights translated."""
    return _translated(theirs.config.to_dict() | {"architectures": None}, dict(theirs.named_parameters()), **overrides)


def _translated(values: dict[str, Any], parameters: Mapping[str, Tensor], **overrides: Any) -> Moe:
    model = Moe(MoeConfig(**{**vars(MOE_HUB.from_config(values)), **overrides}))
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            for part in MOE_HUB.parts(model.config, fqn, parameters.keys()):
                part_of_parameter(part, parameter).copy_(part_of_file(part, parameters[part.name]))
    return model


def _largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _assert_same_gradients(ours: Moe, theirs: nn.Module) -> None:
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    met: set[str] = set()
    for fqn, parameter in ours.named_parameters():
        assert parameter.grad is not None
        for part in MOE_HUB.parts(ours.config, fqn, gradients.keys()):
            expected = gradients[part.name]
            assert expected is not None
            difference = _largest_difference(part_of_parameter(part, parameter.grad), part_of_file(part, expected))
            assert difference < 1e-5, fqn
            met.add(part.name)
    assert met == gradients.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_those_of_transformers(variant: str) -> None:
    theirs = _theirs(*VARIANTS[variant])
    model = _ours(theirs, balance_loss=0.0)
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 53, (2, 2, 150), generator=generator)
    labels[0, :20] = IGNORE_INDEX
    their_logits = theirs(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(their_logits.flatten(0, 1), labels.flatten(), reduction="sum").div(280).backward()
    logits = model(tokens)
    assert isinstance(logits, Tensor) and _largest_difference(logits, their_logits) < 1e-5
    loss = model(tokens, labels=labels)
    assert isinstance(loss, Tensor)
    loss.div(280).backward()
    _assert_same_gradients(model, theirs)


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe, some dense"])
def test_a_folder_that_transformers_saved_is_understood(variant: str, tmp_path: Path) -> None:
    theirs: Any = _theirs(*VARIANTS[variant])
    theirs.save_pretrained(tmp_path)
    model = _translated(json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors"))
    tokens = torch.randint(0, 53, (2, 40), generator=torch.Generator().manual_seed(3))
    logits = model(tokens)
    assert isinstance(logits, Tensor)
    assert _largest_difference(logits, theirs(input_ids=tokens, use_cache=False).logits) < 1e-5


def test_one_layer_and_one_sequence_have_the_balance_loss_of_transformers() -> None:
    """What is left of the definitions' difference there is a factor: theirs is num_experts_per_token times ours."""
    theirs = _theirs("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.7}, 1)
    model = _ours(theirs)
    assert model.config.balance_loss == 0.7 * 2
    tokens, labels = torch.randint(0, 53, (2, 1, 100), generator=torch.Generator().manual_seed(4))
    output = theirs(input_ids=tokens, use_cache=False, output_router_logits=True)
    their_loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    (their_loss + 0.7 * load_balancing_loss_func(output.router_logits, 5, 2)).backward()
    loss = model(tokens, labels=labels)
    assert isinstance(loss, Tensor)
    assert loss.item() / 100 == pytest.approx(their_loss.item(), rel=1e-5)
    loss.div(100).backward()
    _assert_same_gradients(model, theirs)
