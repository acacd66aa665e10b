"""Hugging Face folders of small random models, made by transformers, and what it makes of ours."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 6}),
    "llama3.1": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "hidden_size": 36, "num_attention_heads": 9}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 4}),
    "mixtral": ("Mixtral", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "moe_intermediate_size": 12,
            "head_dim": 4,
            "mlp_only_layers": [0],
        },
    ),
}
"""By name: the class, and fields that make it what it is. 6 query heads to 2 of keys: nothing that hides a mix-up."""

BASE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 53,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def make_folder(
    path: Path,
    name: str = "llama3.1",
    *,
    dtype: torch.dtype = torch.float32,
    file_bytes: int | None = None,
    **fields: Any,
) -> Path:
    """Saves a random model; norms and biases are none of ones and zeros."""
    architecture, own = ARCHITECTURES[name]
    if name == "smollm2":
        own = own | {"num_key_value_heads": 3}
    torch.manual_seed(3)
    config = getattr(transformers, f"{architecture}Config")(**BASE | own | fields)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    sharded = {} if file_bytes is None else {"max_shard_size": file_bytes}
    model.to(dtype).save_pretrained(path, **sharded)
    return path


def logits_by_transformers(path: Path, tokens: Tensor) -> Tensor:
    """Logits of what transformers loads from a folder, after it has found every key in its place."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


TOKENS = torch.randint(0, 53, (2, 100), generator=torch.Generator().manual_seed(1))
