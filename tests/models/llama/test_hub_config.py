"""Tests that config.json is read as transformers reads it, and that nothing in it is passed over."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from models import registry
from models.llama import LlamaConfig, RotaryScaling, from_hub_config, to_hub_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 53,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
OURS = LlamaConfig(
    num_layers=2,
    width=24,
    num_heads=6,
    num_kv_heads=2,
    feed_forward_width=40,
    vocab_size=53,
    max_sequence_length=128,
    norm_eps=1e-6,
)
SMOLLM2: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA31_8B: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(("published", "preset"), [(SMOLLM2, "smollm2-135m"), (LLAMA31_8B, "llama3.1-8b")])
def test_a_published_config_is_our_preset_of_that_model(published: dict[str, Any], preset: str) -> None:
    whole = published | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert from_hub_config(whole) == LlamaConfig.preset(preset)


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("scaled", [False, True])
def test_what_transformers_saves_is_read_as_the_model_that_it_builds(
    architecture: str, scaled: bool, tmp_path: Path
) -> None:
    rope = LLAMA3 | {"rope_type": "llama3"} if scaled else {"rope_type": "default"}
    fields = {name: value for name, value in BASE.items() if name not in ("architectures", "model_type")}
    more = {"sliding_window": None} if architecture == "Mistral" else {}
    config = getattr(transformers, f"{architecture}Config")(
        **fields, head_dim=10, tie_word_embeddings=True, rope_parameters=rope | {"rope_theta": 777.0}, **more
    )
    getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(tmp_path)
    ours = from_hub_config(json.loads((tmp_path / "config.json").read_text()))
    assert ours == LlamaConfig(
        **{name: getattr(OURS, name) for name in ("num_layers", "width", "num_heads", "num_kv_heads", "norm_eps")},
        feed_forward_width=40,
        vocab_size=53,
        max_sequence_length=128,
        head_dim=10,
        rope_theta=777.0,
        rope_scaling=RotaryScaling(original_sequence_length=64) if scaled else None,
        tied_embeddings=True,
        attention_bias=architecture == "Qwen2",
        qk_norm=architecture == "Qwen3",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_dim": 10, "tied_embeddings": True},
        {"width": 25, "head_dim": 4},
        {"attention_bias": True},
        {"qk_norm": True, "head_dim": 128},
        {"qk_norm": True, "rope_scaling": RotaryScaling(original_sequence_length=64), "rope_theta": 5.5},
    ],
)
def test_a_config_comes_back_from_what_it_is_exported_as_through_transformers(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    config = LlamaConfig(**{"width": 24, "num_heads": 6, "num_kv_heads": 2, "num_layers": 2} | fields)
    written = to_hub_config(config)
    assert from_hub_config(written) == config
    (tmp_path / "config.json").write_text(json.dumps(written))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert from_hub_config(json.loads((tmp_path / "again" / "config.json").read_text())) == config


def test_what_no_class_of_transformers_computes_is_not_exported() -> None:
    with pytest.raises(ValueError, match="attention_bias=True with qk_norm=True"):
        to_hub_config(LlamaConfig(attention_bias=True, qk_norm=True))


def test_a_field_that_is_left_out_has_the_value_that_its_class_gives_it() -> None:
    assert from_hub_config(BASE) == OURS
    without = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
    assert from_hub_config(without).num_kv_heads == 6
    qwen3 = BASE | {"model_type": "qwen3", "architectures": None}
    assert from_hub_config(qwen3).head_dim == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"logit_scale": 2.0, "residual_multiplier": 0.5}, "logit_scale=2.0 .*residual_multiplier=0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "must have factor, low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "attention_factor": 2}}, "attention_factor"),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "factor": "8"}}, "factor='8' must be a number"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}, "rope_theta": 3.0}, "rope_theta=3.0 and"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"factor": 2.0}}, "must say the same"),
        ({"rope_parameters": [1]}, "must be a JSON object"),
        ({"rope_theta": True}, "rope_theta=True must be a number"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"sliding_window": 127}, "sliding_window=127"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 64}, "sliding_window=64"),
        ({"model_type": "qwen2", "architectures": None, "use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"layer_types": 3}, "layer_types=3"),
        ({"hidden_size": "24"}, "hidden_size='24' must be an integer"),
        ({"num_attention_heads": 0}, "num_heads=0 must be positive"),
        ({"hidden_size": None, "vocab_size": None}, "lacks hidden_size, vocab_size"),
        ({"no_rope_layers": [1, 1]}, "no_rope_layers"),
    ],
)
def test_what_is_not_built_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hub_config(BASE | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "architectures": None, "sliding_window": 128},
        {"model_type": "qwen2", "architectures": None, "sliding_window": 4, "max_window_layers": 1},
        {"pad_token_id": 3, "unknown_but_null": None, "layer_types": ["full_attention"] * 2},
    ],
)
def test_what_changes_no_number_is_accepted(fields: dict[str, Any]) -> None:
    from_hub_config(BASE | fields)


def test_a_model_type_that_is_not_built_is_refused_with_the_legal_ones() -> None:
    assert registry.from_hub_config(BASE) == OURS
    with pytest.raises(ValueError, match="model_type='gemma', which is not built; legal: llama, mistral, qwen2, qwen3"):
        registry.from_hub_config({"model_type": "gemma"})
