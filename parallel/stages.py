"""Cuts a model by layer into the stages of a pipeline."""

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from torch import nn

from parallel.config import ParallelConfig
from parallel.plan import Block, ParallelPlan
from parallel.schedules import num_stages, stage_ranks


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a model that runs in one piece.

    Attributes:
        index: Its place in the pipeline, from 0.
        rank: Who runs it: a coordinate along `pp`.
        modules: Fqns of its modules in the order in which they run.
    """

    index: int
    rank: int
    modules: tuple[str, ...]


def cut(plan: ParallelPlan, config: ParallelConfig) -> tuple[Stage, ...]:
    """The stages of a model, balanced by cost unless the config gives them.

    Args:
        plan: What the model declares.
        config: The layout, which `check_stages` has passed.
    """
    before, after = (sum(each.cost for each in blocks) for blocks in (plan.first, plan.last))
    costs = [block.cost for block in plan.blocks]
    counts = config.stages or balance(costs, num_stages(config), before=before, after=after)
    ranks = stage_ranks(config)
    ends = list(accumulate(counts))
    stages = []
    for index, (end, count, rank) in enumerate(zip(ends, counts, ranks, strict=True)):
        blocks = (
            *(plan.first if index == 0 else ()),
            *plan.blocks[end - count : end],
            *(plan.last if index == len(counts) - 1 else ()),
        )
        stages.append(Stage(index=index, rank=rank, modules=tuple(block.fqn for block in blocks)))
    return tuple(stages)


def balance(costs: Sequence[float], count: int, *, before: float = 0.0, after: float = 0.0) -> tuple[int, ...]:
    """Blocks of each stage, such that the dearest stage is as cheap as can be and the others are about even.

    Args:
        costs: Cost of each block, in order; at least one a stage.
        count: Stages.
        before: Cost of what the first stage has beside its blocks.
        after: Cost of what the last stage has beside its blocks.
    """
    return _balance(tuple(costs), count, before, after)


@lru_cache
def _balance(costs: tuple[float, ...], count: int, before: float, after: float) -> tuple[int, ...]:
    sums = [0.0, *accumulate(costs)]

    def cost(start: int, end: int) -> float:
        return sums[end] - sums[start] + before * (start == 0) + after * (end == len(costs))

    # For each number of blocks: the dearest stage so far, the sum of squares, and where each stage ends.
    best: dict[int, tuple[float, float, tuple[int, ...]]]
    best = {end: (cost(0, end), cost(0, end) ** 2, (end,)) for end in range(1, len(costs) + 1)}
    for stage in range(1, count):
        best = {
            end: min(
                (max(dearest, cost(start, end)), squares + cost(start, end) ** 2, (*ends, end))
                for start, (dearest, squares, ends) in best.items()
                if start < end
            )
            for end in range(stage + 1, len(costs) + 1)
        }
    ends = best[len(costs)][2]
    return tuple(end - start for start, end in zip((0, *ends), ends, strict=False))


def part_of_plan(plan: ParallelPlan, modules: Collection[str]) -> ParallelPlan:
    """The plan of a part of a model.

    Args:
        plan: That of the whole model.
        modules: Fqns of the blocks, and of what is before and after them, that the part has.
    """
    starts = tuple(f"{fqn}." for fqn in modules)
    units = []
    for unit in plan.units:
        kept = tuple(fqn for fqn in unit.modules if f"{fqn}.".startswith(starts))
        if kept:
            # A stage stays gathered through the step, so nothing is won by freeing some of it early.
            units.append(replace(unit, modules=kept, backward_needs_weights=True))

    def own(blocks: Sequence[Block]) -> tuple[Block, ...]:
        return tuple(block for block in blocks if block.fqn in modules)

    return replace(
        plan, units=tuple(units), blocks=own(plan.blocks), first=own(plan.first), last=own(plan.last), tied=()
    )


def check_cut(model: nn.Module, plan: ParallelPlan) -> None:
    """Makes sure that every parameter has a stage.

    Args:
        model: The whole model.
        plan: What it declares.

    Raises:
        ValueError: If a parameter lies outside of what the plan calls first, blocks and last, or tied parameters are
            others than one of the first stage and one of the last.
    """
    starts = tuple(f"{block.fqn}." for block in _all_blocks(plan))
    outside = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False) if not fqn.startswith(starts)]
    if outside:
        raise ValueError(
            f"pp cuts a model into what its plan calls first, blocks and last, but {len(outside)} parameters of "
            f"{type(model).__name__} lie elsewhere ({', '.join(outside[:3])} ...); name their modules in the plan"
        )
    first, last = (tuple(f"{block.fqn}." for block in blocks) for blocks in (plan.first, plan.last))
    for names in plan.tied:
        if len(names) != 2 or not names[0].startswith(first) or not names[1].startswith(last):
            raise ValueError(f"pp ties a parameter of the first stage to one of the last, but the plan ties {names}")


def check_trainable(model: nn.Module, plan: ParallelPlan, config: ParallelConfig) -> None:
    """Makes sure that every stage trains something: backward of the first ones would have nothing to begin with.

    Args:
        model: The whole model.
        plan: What it declares.
        config: The layout.

    Raises:
        ValueError: If all of a stage is frozen.
    """
    trainable = [fqn for fqn, each in model.named_parameters(remove_duplicate=False) if each.requires_grad]
    for stage in cut(plan, config):
        starts = tuple(f"{fqn}." for fqn in stage.modules)
        if not any(fqn.startswith(starts) for fqn in trainable):
            raise ValueError(
                f"pp={config.pp} gives every stage something to train, but all of stage {stage.index} "
                f"({stage.modules[0]} to {stage.modules[-1]}) is frozen; train a parameter of each stage, such as an "
                "adapter in every block, or use fewer stages"
            )


def keep_part(model: nn.Module, plan: ParallelPlan, modules: Collection[str]) -> None:
    """Drops all of a model that a part does not have, in place; what is left keeps its fqns.

    Args:
        model: The model, or a part of it.
        plan: That of the whole model.
        modules: Fqns to keep.
    """
    for block in _all_blocks(plan):
        owner, _, name = block.fqn.rpartition(".")
        if block.fqn in modules or getattr(model.get_submodule(owner), name, None) is None:
            continue
        if block in plan.blocks:
            delattr(model.get_submodule(owner), name)
        else:
            setattr(model.get_submodule(owner), name, None)


def stage_module(model: nn.Module, plan: ParallelPlan, stage: Stage) -> nn.Module:
    """A module that runs one of several stages of a part, and shares the modules of it.

    Args:
        model: The part.
        plan: That of the whole model.
        stage: Which.
    """
    shared = {id(module): module for module in map(model.get_submodule, stage.modules)}
    others = [block.fqn for block in _all_blocks(plan) if block.fqn not in stage.modules]
    named = dict(model.named_modules(remove_duplicate=False))
    # What another stage has is dropped from the copy, so it need not be copied either.
    shared |= {id(named[fqn]): named[fqn] for fqn in others if fqn in named}
    part = copy.deepcopy(model, shared)
    keep_part(part, plan, stage.modules)
    return part


def untie(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Gives each of two tied parameters that one rank holds in two stages memory of its own.

    Args:
        model: The part of the rank.
        tied: Groups of parameter fqns.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for first, other in tied:
        if first in named and other in named:
            owner, _, name = other.rpartition(".")
            twin = nn.Parameter(named[first].detach().clone(), requires_grad=named[first].requires_grad)
            setattr(model.get_submodule(owner), name, twin)


def _all_blocks(plan: ParallelPlan) -> Iterator[Block]:
    yield from (*plan.first, *plan.blocks, *plan.last)
