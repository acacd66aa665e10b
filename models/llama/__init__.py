"""LLaMA-style decoders: LLaMA 2 and 3, SmolLM2, Mistral without window, Qwen2 and Qwen3."""

from models.layers.rotary import RotaryScaling
from models.llama.config import PRESETS, LlamaConfig
from models.llama.hub_config import HUB_TYPES, from_hub_config, to_hub_config
from models.llama.keys import from_hub_name, to_hub_name
from models.llama.model import Llama
from models.llama.plan import llama_plan

__all__ = [
    "HUB_TYPES",
    "PRESETS",
    "Llama",
    "LlamaConfig",
    "RotaryScaling",
    "from_hub_config",
    "from_hub_name",
    "llama_plan",
    "to_hub_config",
    "to_hub_name",
]
