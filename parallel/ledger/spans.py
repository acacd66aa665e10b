"""Says which blocks and units of a rank run in one piece, and in which place each unit is needed."""

from dataclasses import dataclass
from functools import lru_cache

from parallel.ledger.parts import ModelParts, UnitSpec
from parallel.plan import innermost
from parallel.stages import cut


@dataclass(frozen=True, kw_only=True)
class Span:
    """What a rank runs in one piece: the model, or one stage of a pipeline.

    Attributes:
        blocks: Numbers of its blocks among those of the rank.
        is_first: Whether it starts from tokens.
        is_last: Whether it ends in the loss.
        units: Its units.
    """

    blocks: range
    is_first: bool
    is_last: bool
    units: tuple[UnitSpec, ...]


@lru_cache
def spans_of(parts: ModelParts) -> tuple[Span, ...]:
    """What a rank runs, in the order of the model.

    Args:
        parts: The rank's part of the model.
    """
    blocks = [block.fqn for block in parts.plan.blocks]
    if parts.config.pp == 1:
        return (Span(blocks=range(len(blocks)), is_first=True, is_last=True, units=parts.units),)
    stages, spans = cut(parts.whole, parts.config), []
    for stage in stages:
        if stage.rank == parts.pp_rank:
            own = [index for index, fqn in enumerate(blocks) if fqn in stage.modules]
            starts = tuple(f"{fqn}." for fqn in stage.modules)
            units = tuple(unit for unit in parts.units if unit.parameters and unit.parameters[0].fqn.startswith(starts))
            spans.append(
                Span(
                    blocks=range(own[0], own[-1] + 1),
                    is_first=stage is stages[0],
                    is_last=stage is stages[-1],
                    units=units,
                )
            )
    return tuple(spans)


@lru_cache
def layers_of(parts: ModelParts) -> list[list[UnitSpec]]:
    """Units by the place where they are gathered: the embedding, each block, the head, and the root.

    Args:
        parts: The rank's part of the model.
    """
    starts = ["embed", *(block.fqn for block in parts.plan.blocks), "head"]
    places = {start: place for place, start in enumerate(starts)}
    layers: list[list[UnitSpec]] = [[] for _ in (*starts, "root")]
    for unit in parts.units:
        around = {innermost(each.fqn, places) for each in unit.parameters}
        layers[places.get(around.pop() or "", -1) if len(around) == 1 else -1].append(unit)
    return layers
