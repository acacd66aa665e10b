"""What a family of models says of the Hugging Face folders that hold its models."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class HubPart:
    """A part of a parameter of ours that is, perhaps transposed, a part of a tensor of a file.

    Attributes:
        name: The tensor's name in files.
        expert: The part's place along the first dim of our parameter. None: it is the whole parameter.
        rows: First row along the second dim of the file's tensor and the one after the last. None: all of them.
        transposed: Whether the file has the last two dims the other way round.
    """

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class HubFormat:
    """How Hugging Face folders hold the models of a family.

    Attributes:
        types: Values of `model_type` in config.json that are of this family.
        to_config: Makes what config.json holds of a config, refusing what no class of `transformers` computes.
        from_config: Makes a config of what config.json holds, refusing by name what is not built.
        parts: Says of a config, an fqn and the names in a folder (None: of the folder to be written) which parts of
            the tensors there make up that parameter.
        ignored: Says of a name that files may hold it though it is no parameter.
    """

    types: tuple[str, ...]
    to_config: Callable[[Any], dict[str, Any]]
    from_config: Callable[[Mapping[str, Any]], ModelConfig]
    parts: Callable[[Any, str, Set[str] | None], tuple[HubPart, ...]]
    ignored: Callable[[str], bool]


@dataclass(frozen=True, kw_only=True)
class TitanKey:
    """Where torchtitan keeps a parameter.

    Attributes:
        name: Its name there.
        num_rotary_heads: Heads of whose rows torchtitan has the rotary pairs side by side, where we have the first
            components of all pairs before the second ones; None: rows lie as ours.
    """

    name: str
    num_rotary_heads: int | None = None
