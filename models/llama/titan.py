"""Names of a LLaMA-style model's parameters in torchtitan.

Source: torchtitan's models llama3 and qwen3. Its Llama turns neighbouring components (complex numbers, as Meta's code
does), its Qwen3 the two halves of a head, as we and Hugging Face do.
"""

import re

from models.hub import TitanKey
from models.llama.config import LlamaConfig

_OUTSIDE = {"embed": "tok_embeddings", "norm": "norm", "head": "output"}
_WITHIN = {
    "attention_norm": "attention_norm",
    "attention.q_proj": "attention.wq",
    "attention.k_proj": "attention.wk",
    "attention.v_proj": "attention.wv",
    "attention.o_proj": "attention.wo",
    "attention.q_norm": "attention.q_norm",
    "attention.k_norm": "attention.k_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.up_proj": "feed_forward.w3",
    "feed_forward.down_proj": "feed_forward.w2",
}


def titan_key(config: LlamaConfig, fqn: str) -> TitanKey:
    """Where torchtitan keeps a parameter.

    Args:
        config: Shape of the model.
        fqn: Such as `blocks.0.attention.q_proj.weight`.

    Raises:
        ValueError: If torchtitan has no such parameter.
    """
    module, _, kind = fqn.rpartition(".")
    if kind == "weight" and module in _OUTSIDE:
        return TitanKey(name=f"{_OUTSIDE[module]}.weight")
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    if kind != "weight" or not match or match[2] not in _WITHIN:
        raise ValueError(f"torchtitan has no parameter for {fqn!r}: its models have no bias")
    heads = {"attention.q_proj": config.num_heads, "attention.k_proj": config.num_kv_heads}.get(match[2])
    name = f"layers.{match[1]}.{_WITHIN[match[2]]}.weight"
    return TitanKey(name=name, num_rotary_heads=None if config.qk_norm else heads)
