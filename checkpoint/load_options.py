"""What a load is asked to fill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from checkpoint.selection import Keys

Part = Literal["model", "optimizer", "progress", "rng"]
"""`progress` is step, num_tokens and everything stateful."""

PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What a load fills.

    Attributes:
        parts: Parts of the state.
        keys: Tensors of the parts; None: all.
        strict: Whether everything must fit.
        cast: Whether floating-point values may be converted to the dtype that is needed.
    """

    parts: Sequence[Part] = PARTS
    keys: Keys = None
    strict: bool = True
    cast: bool = False

    def __post_init__(self) -> None:
        """Refuses what is no part.

        Raises:
            ValueError: If there is no such part.
        """
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise ValueError(f"unknown parts {unknown}; legal: {', '.join(PARTS)}")
