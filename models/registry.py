"""Which families of models there are; a new one is one line here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from models.config import ModelConfig
from models.llama import Llama, LlamaConfig, from_hub_name, llama_plan, to_hub_name
from parallel.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """What the rest of the toolkit needs of a family of models.

    Attributes:
        name: Its name in recipes and checkpoints.
        config: Class of its configs.
        build: Makes its module of a config; the module fills parameters through its `init_parameter`.
        plan: Gives the parallel plan of a config.
        to_hub_name: Translates a parameter's fqn to its name in Hugging Face files.
        from_hub_name: Translates back.
    """

    name: str
    config: type[ModelConfig]
    build: Callable[[Any], nn.Module]
    plan: Callable[[Any], ParallelPlan]
    to_hub_name: Callable[[str], str]
    from_hub_name: Callable[[str], str]


_ALL = (
    ModelFamily(
        name="llama",
        config=LlamaConfig,
        build=Llama,
        plan=llama_plan,
        to_hub_name=to_hub_name,
        from_hub_name=from_hub_name,
    ),
)
FAMILIES = {each.name: each for each in _ALL}
"""Families by name."""


def family(name: str) -> ModelFamily:
    """A family of models by name.

    Args:
        name: A key of `FAMILIES`.

    Raises:
        ValueError: If there is no such family.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown model family {name!r}; legal: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_of(config: ModelConfig) -> ModelFamily:
    """The family that a config belongs to.

    Args:
        config: Config of a model.

    Raises:
        ValueError: If its class is none of a family.
    """
    for each in FAMILIES.values():
        if type(config) is each.config:
            return each
    legal = ", ".join(each.config.__name__ for each in FAMILIES.values())
    raise ValueError(f"{type(config).__name__} is the config of no model family; legal: {legal}")
