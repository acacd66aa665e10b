"""LLaMA-style decoders: LLaMA 2 and 3, SmolLM2, Mistral without window, Qwen2 and Qwen3."""

from models.hub import HubFormat
from models.layers.rotary import RotaryScaling
from models.llama.config import PRESETS, LlamaConfig
from models.llama.hub_config import HUB_TYPES, from_hub_config, to_hub_config
from models.llama.keys import hub_parts, is_ignored, to_hub_name
from models.llama.model import Llama
from models.llama.plan import llama_plan
from models.llama.titan import titan_key

LLAMA_HUB = HubFormat(
    types=HUB_TYPES, to_config=to_hub_config, from_config=from_hub_config, parts=hub_parts, ignored=is_ignored
)
"""How Hugging Face folders hold such models."""

__all__ = [
    "LLAMA_HUB",
    "PRESETS",
    "Llama",
    "LlamaConfig",
    "RotaryScaling",
    "from_hub_config",
    "llama_plan",
    "titan_key",
    "to_hub_config",
    "to_hub_name",
]
