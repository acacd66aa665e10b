"""Counts model states by the two accountings in use, which users meet under one name."""

from typing import Literal, get_args

Accounting = Literal["classic", "stored"]
"""`classic`: float16 parameters and gradients with a float32 copy and AdamW's moments, as papers on ZeRO count.
`stored`: float32 parameters, gradients and moments, of which units are cast when they are gathered, as this toolkit
holds them."""

_BYTES: dict[Accounting, dict[str, tuple[int, int]]] = {
    "classic": {"no_shard": (16, 0), "zero1": (4, 12), "shard_grad_op": (2, 14), "full_shard": (0, 16)},
    "stored": {"no_shard": (16, 0), "zero1": (8, 8), "shard_grad_op": (2, 16), "full_shard": (0, 16)},
}
"""Bytes a parameter that each rank holds, and that ranks share."""
_FROZEN_BYTES: dict[Accounting, dict[str, tuple[int, int]]] = {
    "classic": {"no_shard": (2, 0), "zero1": (2, 0), "shard_grad_op": (2, 0), "full_shard": (0, 2)},
    "stored": {"no_shard": (4, 0), "zero1": (4, 0), "shard_grad_op": (2, 4), "full_shard": (0, 4)},
}
"""The same of a parameter that is not trained, which has no gradient, no moments and no float32 copy."""


def state_bytes(
    accounting: Accounting, strategy: str, num_parameters: float, ranks: int, *, frozen: float = 0.0
) -> float:
    """Parameters, gradients and AdamW's state of one rank, units in flight left out.

    Args:
        accounting: How bytes are counted.
        strategy: What ranks share: `no_shard`, `zero1`, `shard_grad_op` (ZeRO-2) or `full_shard` (ZeRO-3); hybrids
            are what they are within a group.
        num_parameters: Parameters that the ranks have between them; those of the model over tp x pp.
        ranks: Ranks that share one copy.
        frozen: Share of the parameters that is not trained.

    Raises:
        ValueError: If accounting or strategy is unknown.

    Source: Rajbhandari et al. 2020, "ZeRO", section 3, for `classic`.
    """
    if accounting not in get_args(Accounting):
        raise ValueError(f"unknown accounting {accounting!r}; legal: {', '.join(get_args(Accounting))}")
    table = _BYTES[accounting]
    if strategy not in table:
        raise ValueError(f"unknown strategy {strategy!r}; legal: {', '.join(table)}")
    parts = ((1 - frozen, table[strategy]), (frozen, _FROZEN_BYTES[accounting][strategy]))
    return sum(part * num_parameters * (whole + shared / ranks) for part, (whole, shared) in parts)
