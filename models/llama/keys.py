"""Names of a LLaMA-style model's parameters in Hugging Face safetensors files."""

import re

_OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_WITHIN = {
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate_proj": "mlp.gate_proj",
    "feed_forward.up_proj": "mlp.up_proj",
    "feed_forward.down_proj": "mlp.down_proj",
}
_OUTSIDE_BACK = {theirs: ours for ours, theirs in _OUTSIDE.items()}
_WITHIN_BACK = {theirs: ours for ours, theirs in _WITHIN.items()}


def to_hub_name(fqn: str) -> str:
    """The name in Hugging Face files of a parameter of ours.

    Args:
        fqn: Such as `blocks.0.attention.q_proj.weight`.

    Raises:
        ValueError: If the name is not one of a LLaMA-style model.
    """
    return _translate(fqn, r"blocks\.(\d+)", "model.layers", _OUTSIDE, _WITHIN)


def from_hub_name(name: str) -> str | None:
    """The name of a parameter of ours that Hugging Face files call by another.

    Args:
        name: Such as `model.layers.0.self_attn.q_proj.weight`.

    Returns:
        Our name; None for rotary frequencies, which files of old releases hold and the config gives.

    Raises:
        ValueError: If the name is not one of a LLaMA-style model.
    """
    if re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name):
        return None
    return _translate(name, r"model\.layers\.(\d+)", "blocks", _OUTSIDE_BACK, _WITHIN_BACK)


def _translate(name: str, block: str, prefix: str, outside: dict[str, str], within: dict[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if module in outside:
            return f"{outside[module]}.{kind}"
        match = re.fullmatch(block + r"\.(.+)", module)
        if match and match[2] in within:
            return f"{prefix}.{match[1]}.{within[match[2]]}.{kind}"
    raise ValueError(f"{name!r} is no parameter of a LLaMA-style model; known modules: {[*outside, *within]}")
