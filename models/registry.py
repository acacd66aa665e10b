"""Which families of models there are; a new one is one line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from models.config import ModelConfig
from models.hub import HubFormat, TitanKey
from models.llama import LLAMA_HUB, Llama, LlamaConfig, llama_plan, titan_key
from models.moe import MOE_HUB, Moe, MoeConfig, moe_plan
from parallel.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """What the rest of the toolkit needs of a family of models.

    Attributes:
        name: Its name in recipes and checkpoints.
        config: Class of its configs.
        build: Makes its module of a config; the module fills parameters through its `init_parameter`.
        plan: Gives the parallel plan of a config.
        hub: How Hugging Face folders hold its models; None: they cannot be imported or exported.
        titan_key: Says of a config and an fqn where torchtitan keeps that parameter; None: it has no such models.
    """

    name: str
    config: type[ModelConfig]
    build: Callable[[Any], nn.Module]
    plan: Callable[[Any], ParallelPlan]
    hub: HubFormat | None = None
    titan_key: Callable[[Any, str], TitanKey] | None = None


_ALL = (
    ModelFamily(
        name="llama",
        config=LlamaConfig,
        build=Llama,
        plan=llama_plan,
        hub=LLAMA_HUB,
        titan_key=titan_key,
    ),
    ModelFamily(name="moe", config=MoeConfig, build=Moe, plan=moe_plan, hub=MOE_HUB),
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


def from_hub_config(values: Mapping[str, Any]) -> ModelConfig:
    """The config of the model that a Hugging Face folder holds.

    Args:
        values: What its config.json holds.

    Raises:
        ValueError: If it asks for anything that is not built; names it.
    """
    kind = values.get("model_type")
    formats = [each.hub for each in FAMILIES.values() if each.hub is not None]
    for each in formats:
        if kind in each.types:
            return each.from_config(values)
    legal = ", ".join(name for each in formats for name in each.types)
    raise ValueError(f"config.json has model_type={kind!r}, which is not built; legal: {legal}")


def hub_format(config: ModelConfig) -> HubFormat:
    """How Hugging Face folders hold a model.

    Args:
        config: Its config.

    Raises:
        ValueError: If they cannot.
    """
    family = family_of(config)
    if family.hub is None:
        raise ValueError(
            f"models of the family {family.name} cannot be imported from or exported to Hugging Face folders"
        )
    return family.hub


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
