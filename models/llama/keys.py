"""Names of a LLaMA-style model's parameters in Hugging Face safetensors files."""

import re
from collections.abc import Set

from models.hub import HubPart
from models.llama.config import LlamaConfig

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


def to_hub_name(fqn: str) -> str:
    """The name in Hugging Face files of a parameter of ours.

    Args:
        fqn: Such as `blocks.0.attention.q_proj.weight`.

    Raises:
        ValueError: If the name is not one of a LLaMA-style model.
    """
    module, _, kind = fqn.rpartition(".")
    if kind in ("weight", "bias"):
        if module in _OUTSIDE:
            return f"{_OUTSIDE[module]}.{kind}"
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
        if match and match[2] in _WITHIN:
            return f"model.layers.{match[1]}.{_WITHIN[match[2]]}.{kind}"
    raise ValueError(f"{fqn!r} is no parameter of a LLaMA-style model; known modules: {[*_OUTSIDE, *_WITHIN]}")


def hub_parts(config: LlamaConfig, fqn: str, names: Set[str] | None) -> tuple[HubPart, ...]:
    """Where Hugging Face files keep a parameter: as it is, under another name.

    Args:
        config: Shape of the model.
        fqn: Such as `blocks.0.attention.q_proj.weight`.
        names: Names in the folder, which change nothing here.

    Raises:
        ValueError: If the name is not one of a LLaMA-style model.
    """
    return (HubPart(name=to_hub_name(fqn)),)


def is_ignored(name: str) -> bool:
    """Whether files may hold a name that is no parameter: rotary frequencies, which the config gives too.

    Args:
        name: A name in files.
    """
    return re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name) is not None
