"""Decoders with mixtures of experts: Mixtral and Qwen3-MoE, with softmax or sigmoid scores and shared experts."""

from models.moe.config import MOE_PRESETS, MoeConfig
from models.moe.model import Moe
from models.moe.plan import moe_plan

__all__ = ["MOE_PRESETS", "Moe", "MoeConfig", "moe_plan"]
