"""Finds a model by name: a preset that this toolkit builds, or a shape that published results use."""

from models.config import ModelConfig
from models.llama import LlamaConfig
from models.llama.config import PRESETS
from models.moe import MoeConfig
from models.moe.config import MOE_PRESETS
from parallel.plan import ModelShape
from parallel.planner.shapes import SHAPES

ALIASES = {
    "llama3-8b": "llama3.1-8b",
    "llama-8.03b": "llama3.1-8b",
    "llama3-70b": "llama3.1-70b",
    "llama-70.55b": "llama3.1-70b",
    "llama3-405b": "llama3.1-405b",
    "moe-debug": "debug",
}
"""Names that published results use for presets, and one for the preset that two families have."""


def find_config(name: str) -> ModelConfig | None:
    """The config of a model that this toolkit builds; None for a name that is only a shape.

    Args:
        name: A preset, or an alias of one.

    Raises:
        ValueError: If there is neither a preset nor a shape of that name.
    """
    preset = ALIASES.get(name, name)
    if name != "moe-debug" and preset in PRESETS:
        return LlamaConfig.preset(preset)
    if preset in MOE_PRESETS:
        return MoeConfig.preset(preset)
    if name in SHAPES:
        return None
    legal = dict.fromkeys([*PRESETS, *MOE_PRESETS, *SHAPES, *ALIASES])
    raise ValueError(f"unknown model {name!r}; legal: {', '.join(legal)}")


def find_shape(name: str) -> ModelShape:
    """The shape of a model.

    Args:
        name: A preset, an alias of one, or a name of `SHAPES`.

    Raises:
        ValueError: If there is none of that name.
    """
    config = find_config(name)
    return SHAPES[name] if config is None else config.shape
