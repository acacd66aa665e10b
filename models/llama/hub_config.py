"""A LLaMA-style model's shape as the config.json of Hugging Face folders says it."""

from collections.abc import Mapping
from typing import Any

from models.layers.rotary import RotaryScaling
from models.llama.config import LlamaConfig

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
HUB_TYPES = tuple(_CLASSES)
"""Values of `model_type` that are of this family."""

_COUNTS = {
    "hidden_size": "width",
    "intermediate_size": "feed_forward_width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_sequence_length",
}
_NUMBERS = {"rms_norm_eps": "norm_eps", "initializer_range": "init_std"}
_ROTARY = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_sequence_length",
}
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1,
    "rope_interleaved": False,
    "use_sliding_window": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
}
"""Fields of which one value is built."""

_INERT = {
    *(
        "_name_or_path",
        "_model_name_or_path",
        "unk_token_id",
        "is_decoder",
        "is_llama_config",
        "transformers_version",
        "transformers.js_config",
        "use_cache",
    ),
    *("torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "problem_type"),
    *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "chunk_size_feed_forward"),
    "max_window_layers",
}
"""Fields that change no logit: what the text's tokens are, how results are returned, and layers of a window that is
off."""

_READ = {
    *("model_type", "architectures", "num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias"),
    *("rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types"),
}
_KNOWN = {*_READ, *_INERT, *_COUNTS, *_NUMBERS, *_ONLY}


def from_hub_config(values: Mapping[str, Any]) -> LlamaConfig:
    """The config of ours that computes what a config.json describes.

    Args:
        values: What config.json holds, with one of `HUB_TYPES` as its model_type.

    Raises:
        ValueError: If it lacks a field, or asks for anything that is not built; names the fields.
    """
    # A field that is null is one that is not there.
    values = {name: value for name, value in values.items() if value is not None}
    kind = values["model_type"]
    refused = [f"{name}={values[name]!r} (unknown)" for name in sorted(values.keys() - _KNOWN)]
    refused += [
        f"{name}={values[name]!r} (built: {only!r})" for name, only in _ONLY.items() if values.get(name, only) != only
    ]
    refused += _refused_attention(values, kind)
    lacking = [name for name in (*_COUNTS, "rms_norm_eps") if name not in values]
    if refused or lacking:
        parts = ["asks for what is not built: " + ", ".join(refused)] if refused else []
        parts += ["lacks " + ", ".join(lacking)] if lacking else []
        raise ValueError(f"config.json of a {kind} model {'; and '.join(parts)}")
    fields: dict[str, Any] = {ours: _integer(values, name) for name, ours in _COUNTS.items()}
    fields |= {ours: _number(values, name) for name, ours in _NUMBERS.items() if name in values}
    return LlamaConfig(
        **fields,
        **_rotary(values),
        num_kv_heads=_integer(values, "num_key_value_heads", fields["num_heads"]),
        head_dim=_head_dim(values, kind),
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        attention_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def to_hub_config(config: LlamaConfig) -> dict[str, Any]:
    """What config.json says of a model of ours, in the words that releases 4 and 5 of `transformers` read.

    Args:
        config: Shape of the model.

    Raises:
        ValueError: If no class of `transformers` computes it.
    """
    if config.attention_bias and config.qk_norm:
        raise ValueError(
            "attention_bias=True with qk_norm=True: no class of transformers has a bias on q, k and v alone beside "
            "norms of queries and keys, so that it cannot be exported"
        )
    kind = "qwen2" if config.attention_bias else "qwen3" if config.qk_norm else "llama"
    if kind == "llama" and config.width % config.num_heads:
        kind = "mistral"  # the same model, whose config does not insist that heads divide the width
    fields: dict[str, Any] = {theirs: getattr(config, ours) for theirs, ours in (_COUNTS | _NUMBERS).items()}
    scaling: dict[str, Any] | None = None
    if config.rope_scaling is not None:
        scaling = {"rope_type": "llama3"}
        scaling |= {theirs: getattr(config.rope_scaling, ours) for theirs, ours in _ROTARY.items()}
    # Null, where a default of the class would switch something on.
    window = {} if kind == "llama" else {"sliding_window": None}
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        **fields,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.shape.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **window,
    }


def _refused_attention(values: Mapping[str, Any], kind: str) -> list[str]:
    """Classes, biases, windows and layers other than those that are built."""
    refused: list[str] = []
    if values.get("architectures", [_CLASSES[kind]]) != [_CLASSES[kind]]:
        refused.append(f"architectures={values['architectures']!r} (built: {_CLASSES[kind]})")
    # Qwen2's class never asks; the others give the output projection a bias too.
    if values.get("attention_bias", kind == "qwen2") != (kind == "qwen2"):
        refused.append(f"attention_bias={values['attention_bias']!r}")
    # The classes of Qwen have a window only where use_sliding_window, which is not built, asks for it.
    if kind in ("llama", "mistral") and "sliding_window" in values:
        window = _integer(values, "sliding_window")
        if window < _integer(values, "max_position_embeddings", window + 1):
            refused.append(f"sliding_window={window}, shorter than max_position_embeddings")
    layers = values.get("layer_types", [])
    if not isinstance(layers, list) or any(each != "full_attention" for each in layers):
        refused.append(f"layer_types={layers!r} (built: full_attention)")
    return refused


def _head_dim(values: Mapping[str, Any], kind: str) -> int | None:
    """As the class has it where config.json is silent; None where it follows from the width, as in our presets."""
    width, num_heads = values["hidden_size"], max(1, values["num_attention_heads"])
    head_dim = _integer(values, "head_dim", 128 if kind == "qwen3" else width // num_heads)
    return None if head_dim * num_heads == width else head_dim


def _rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    """The base and the stretch of rotary frequencies, which releases 4 and 5 of `transformers` write differently.

    Raises:
        ValueError: If they are of a kind that is not built.
    """
    given = [values[name] for name in ("rope_parameters", "rope_scaling") if name in values]
    if any(not isinstance(each, dict) for each in given) or (
        len(given) == 2 and not given[1].items() <= given[0].items()
    ):
        raise ValueError("config.json: rope_parameters or rope_scaling must be a JSON object, both must say the same")
    found = dict(given[0]) if given else {}
    old_kind = found.pop("type", "default")
    kind = found.pop("rope_type", old_kind)
    theta = found.pop("rope_theta", values.get("rope_theta", 10_000.0))
    theta = _number({"rope_theta": theta}, "rope_theta")
    if theta != values.get("rope_theta", theta):
        raise ValueError(f"config.json gives rope_theta={values['rope_theta']} and, in rope_parameters, {theta}")
    if found.pop("partial_rotary_factor", 1) != 1:
        raise ValueError("config.json asks for what is not built: partial_rotary_factor other than 1")
    if kind not in ("default", "llama3"):
        raise ValueError(f"config.json asks for what is not built: rope_type={kind!r} (built: default, llama3)")
    expected = _ROTARY if kind == "llama3" else {}
    if found.keys() != expected.keys():
        raise ValueError(
            f"config.json: rotary frequencies of rope_type={kind!r} must have {', '.join(expected) or 'nothing more'}, "
            f"got {', '.join(found) or 'nothing'}"
        )
    if not found:
        return {"rope_theta": theta}
    fields: dict[str, Any] = {ours: _number(found, theirs) for theirs, ours in _ROTARY.items()}
    fields["original_sequence_length"] = _integer(found, "original_max_position_embeddings")
    return {"rope_theta": theta, "rope_scaling": RotaryScaling(**fields)}


def _integer(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if type(value) is not int:
        raise ValueError(f"config.json: {name}={value!r} must be an integer")
    return value


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {name}={value!r} must be a number")
    return float(value)
