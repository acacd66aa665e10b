"""Finds parameters and units of a model by where they are and what they are like, in one pass for all of them."""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from parallel.ledger.parts import ModelParts, ParameterSpec, UnitSpec
from parallel.plan import innermost


@lru_cache
def kinds_of(parts: ModelParts) -> tuple[tuple[UnitSpec, int], ...]:
    """A unit of each kind, and how many there are of that kind.

    Args:
        parts: The rank's part of the model.
    """
    first: dict[int, UnitSpec] = {}
    for unit in parts.units:
        first.setdefault(id(unit.kind), unit)
    counts = Counter(id(unit.kind) for unit in parts.units)
    return tuple((unit, counts[kind]) for kind, unit in first.items())


@lru_cache
def by_block(parts: ModelParts) -> Mapping[str, Mapping[str, ParameterSpec]]:
    """Parameters by fqn, of each of the rank's blocks and of what comes before and after them.

    Args:
        parts: The rank's part of the model.
    """
    plan = parts.plan
    own: dict[str, dict[str, ParameterSpec]] = {each.fqn: {} for each in (*plan.first, *plan.blocks, *plan.last)}
    for each in parts.parameters:
        block = innermost(each.fqn, own)
        if block is not None:
            own[block][each.fqn] = each
    return own
