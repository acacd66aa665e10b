"""The shape of a model with mixtures of experts as the config.json of Hugging Face folders says it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from models.llama.hub_config import from_hub_config as dense_from_hub_config
from models.llama.hub_config import to_hub_config as dense_to_hub_config
from models.moe.config import MoeConfig

_CLASSES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
HUB_TYPES = tuple(_CLASSES)
"""Values of `model_type` that are of this family."""

_DENSE = {"mixtral": ("mistral", "MistralForCausalLM"), "qwen3_moe": ("qwen3", "Qwen3ForCausalLM")}
"""Type and class of the model that each is but for its experts."""
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_OF_EXPERTS = {
    "mixtral": ("num_experts_per_tok",),
    "qwen3_moe": ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
}
_OPTIONAL = {
    "mixtral": ("router_jitter_noise",),
    "qwen3_moe": ("decoder_sparse_step", "mlp_only_layers"),
}
_INERT = ("output_router_logits", "router_aux_loss_coef")


def from_hub_config(values: Mapping[str, Any]) -> MoeConfig:
    """The config of ours that computes what a config.json describes.

    Args:
        values: What config.json holds, with one of `HUB_TYPES` as its model_type.

    Raises:
        ValueError: If it lacks a field, or asks for anything that is not built; names the fields.
    """
    values = {name: value for name, value in values.items() if value is not None}
    kind = values["model_type"]
    if values.get("architectures", [_CLASSES[kind]]) != [_CLASSES[kind]]:
        raise ValueError(f"config.json has architectures={values['architectures']!r}; built: {_CLASSES[kind]}")
    if values.get("router_jitter_noise", 0):
        raise ValueError(f"config.json has router_jitter_noise={values['router_jitter_noise']!r}; built: 0")
    lacking = [name for name in (*_OF_EXPERTS[kind], "num_hidden_layers") if name not in values]
    lacking += [] if any(name in values for name in _NUM_EXPERTS) else [_NUM_EXPERTS[kind == "mixtral"]]
    if lacking:
        raise ValueError(f"config.json of a {kind} model lacks {', '.join(lacking)}")
    own = {*_NUM_EXPERTS, *_OF_EXPERTS[kind], *_OPTIONAL[kind], *_INERT, "model_type", "architectures"}
    dense = {name: value for name, value in values.items() if name not in own} | {"model_type": _DENSE[kind][0]}
    if "head_dim" not in dense and dense.get("num_attention_heads"):
        dense["head_dim"] = dense.get("hidden_size", 0) // dense["num_attention_heads"]
    shared = dense_from_hub_config(dense)
    fields: dict[str, Any] = asdict(shared) | {"rope_scaling": shared.rope_scaling}
    experts_per_token = values["num_experts_per_tok"]
    dense_layers = _dense_layers(values) if kind == "qwen3_moe" else ()
    num_sparse = shared.num_layers - len(dense_layers)
    return MoeConfig(
        **fields,
        num_experts=next(values[name] for name in _NUM_EXPERTS if name in values),
        num_experts_per_token=experts_per_token,
        expert_width=values.get("moe_intermediate_size", shared.feed_forward_width),
        dense_layers=dense_layers,
        normalize_top_k=values.get("norm_topk_prob", True),
        balance_loss=values.get("router_aux_loss_coef", 0.0) * experts_per_token / max(1, num_sparse),
    )


def to_hub_config(config: MoeConfig) -> dict[str, Any]:
    """What config.json says of a model of ours, in the words that releases 4 and 5 of `transformers` read.

    Args:
        config: Shape of the model.

    Raises:
        ValueError: If no class of `transformers` computes it.
    """
    kind = "qwen3_moe" if config.qk_norm else "mixtral"
    refused = {
        "shared_expert_width": config.shared_expert_width > 0,
        "router_score": config.router_score != "softmax",
        "balance_rate": config.balance_rate > 0,
        "attention_bias": config.attention_bias,
        "dense_layers": kind == "mixtral" and bool(config.dense_layers),
        "normalize_top_k": kind == "mixtral" and not config.normalize_top_k,
    }
    named = [f"{name}={getattr(config, name)!r}" for name, is_refused in refused.items() if is_refused]
    if named:
        raise ValueError(
            f"{_CLASSES[kind]} cannot say {', '.join(named)}, so that the model cannot be exported; one that "
            "is to be must be trained with the defaults of these fields"
        )
    num_sparse = config.num_layers - len(config.dense_layers)
    values = dense_to_hub_config(config) | {
        "model_type": kind,
        "architectures": [_CLASSES[kind]],
        "sliding_window": None,
        "num_experts_per_tok": config.num_experts_per_token,
        "router_aux_loss_coef": config.balance_loss * num_sparse / config.num_experts_per_token,
    }
    if kind == "mixtral":
        return values | {"num_local_experts": config.num_experts, "intermediate_size": config.expert_width}
    return values | {
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.expert_width,
        "norm_topk_prob": config.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": sorted(config.dense_layers),
    }


def _dense_layers(values: Mapping[str, Any]) -> tuple[int, ...]:
    step, named = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers", [])
    return tuple(index for index in range(values["num_hidden_layers"]) if index in named or (index + 1) % step)
