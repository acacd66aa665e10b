"""Decoders with mixtures of experts: Mixtral and Qwen3-MoE, with softmax or sigmoid scores and shared experts."""

from models.hub import HubFormat
from models.llama.keys import is_ignored
from models.moe.config import MOE_PRESETS, MoeConfig
from models.moe.hub_config import HUB_TYPES, from_hub_config, to_hub_config
from models.moe.keys import hub_parts
from models.moe.model import Moe
from models.moe.plan import moe_plan

MOE_HUB = HubFormat(
    types=HUB_TYPES, to_config=to_hub_config, from_config=from_hub_config, parts=hub_parts, ignored=is_ignored
)
"""How Hugging Face folders hold such models."""

__all__ = ["MOE_HUB", "MOE_PRESETS", "Moe", "MoeConfig", "from_hub_config", "moe_plan", "to_hub_config"]
