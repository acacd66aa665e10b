"""Cuts a model by layer into the stages of a pipeline and says which rank runs which."""

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import nn

from parallel.config import ParallelConfig
from parallel.plan import Block, ModelShape, ParallelPlan


@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    """What a schedule asks for.

    Attributes:
        torch_name: Its name in `torch.distributed.pipelining`.
        fewest: Fewest stages of a rank.
        most: Most stages of a rank; None: any number.
        is_v: Whether ranks take their second stages in reverse order, so that the first rank has the last stage.
        in_rounds: Whether micro-batches come in rounds of as many each, about `pp` of them.
        fills_stages: Whether there must be a micro-batch for each stage and not only for each rank.
        splits_backward: Whether gradients of weights are computed apart from those of inputs.
    """

    torch_name: str
    fewest: int = 1
    most: int | None = 1
    is_v: bool = False
    in_rounds: bool = False
    fills_stages: bool = False
    splits_backward: bool = False


SCHEDULES = {
    "gpipe": ScheduleTraits(torch_name="GPipe"),
    "1f1b": ScheduleTraits(torch_name="1F1B"),
    "interleaved_1f1b": ScheduleTraits(torch_name="Interleaved1F1B", fewest=2, most=None, in_rounds=True),
    "interleaved_zero_bubble": ScheduleTraits(
        torch_name="InterleavedZeroBubble", fewest=2, most=None, in_rounds=True, splits_backward=True
    ),
    "zbv_zero_bubble": ScheduleTraits(torch_name="ZBVZeroBubble", fewest=2, most=2, is_v=True, splits_backward=True),
    "dual_pipe_v": ScheduleTraits(
        torch_name="DualPipeV", fewest=2, most=2, is_v=True, fills_stages=True, splits_backward=True
    ),
}
"""By the name that a config gives."""


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


def traits_of(config: ParallelConfig) -> ScheduleTraits:
    """What the schedule of a config asks for.

    Args:
        config: The layout.
    """
    return SCHEDULES[config.schedule or "1f1b"]


def num_stages(config: ParallelConfig) -> int:
    """Stages of the whole pipeline.

    Args:
        config: The layout.
    """
    return len(config.stages) if config.stages else config.pp * traits_of(config).fewest


def check_stages(config: ParallelConfig, shape: ModelShape) -> None:
    """Holds schedule and stages against the number of layers.

    Args:
        config: The layout.
        shape: The model's counts and widths.

    Raises:
        ValueError: If they do not fit each other.
    """
    traits, count, layers = traits_of(config), num_stages(config), shape.num_layers
    of_rank = f"{traits.fewest}" if traits.most == traits.fewest else f"at least {traits.fewest}"
    if count % config.pp or count < traits.fewest * config.pp or (traits.most and count > traits.most * config.pp):
        raise ValueError(
            f"schedule={config.schedule!r} runs {of_rank} stages on each of pp={config.pp} ranks, but stages="
            f"{config.stages} are {count}; legal: a multiple of {config.pp} from {traits.fewest * config.pp}"
            + (f" to {traits.most * config.pp}" if traits.most else "")
        )
    if layers < count:
        raise ValueError(
            f"schedule={config.schedule!r} on pp={config.pp} ranks needs at least {traits.fewest} virtual stages a "
            f"rank, {count} stages in all, each with a block or more; the model has {layers} blocks: pp can be at most "
            f"{layers // traits.fewest}"
        )
    if config.stages and sum(config.stages) != layers:
        raise ValueError(f"stages={config.stages} hold {sum(config.stages)} blocks, but the model has {layers}")


def check_micro_batches(config: ParallelConfig, num_micro_batches: int) -> None:
    """Holds the number of micro-batches of a step against the schedule.

    Args:
        config: The layout.
        num_micro_batches: Micro-batches of a step on each rank.

    Raises:
        ValueError: If the schedule cannot run so many.
    """
    if config.pp == 1 or _runs(config, num_micro_batches):
        return
    legal = [n for n in range(1, num_micro_batches + 4 * num_stages(config)) if _runs(config, n)]
    nearest = sorted(sorted(legal, key=lambda n: abs(n - num_micro_batches))[:4])
    stages = f"pp={config.pp} stages" if num_stages(config) == config.pp else f"{num_stages(config)} stages"
    raise ValueError(
        f"schedule={config.schedule!r} cannot run {num_micro_batches} micro-batches for {stages} on {config.pp} ranks; "
        f"nearest legal numbers: {nearest}"
    )


def _runs(config: ParallelConfig, num_micro_batches: int) -> bool:
    traits = traits_of(config)
    if num_micro_batches < (num_stages(config) if traits.fills_stages else config.pp):
        return False
    return not traits.in_rounds or num_micro_batches % (num_micro_batches // config.pp) == 0


def cut(plan: ParallelPlan, config: ParallelConfig) -> tuple[Stage, ...]:
    """The stages of a model, balanced by cost unless the config gives them.

    Args:
        plan: What the model declares.
        config: The layout, which `check_stages` has passed.
    """
    before, after = (sum(each.cost for each in blocks) for blocks in (plan.first, plan.last))
    costs = [block.cost for block in plan.blocks]
    counts = config.stages or balance(costs, num_stages(config), before=before, after=after)
    ranks = placement(len(counts), config.pp, is_v=traits_of(config).is_v)
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


def placement(count: int, num_ranks: int, *, is_v: bool) -> tuple[int, ...]:
    """The rank of each stage.

    Args:
        count: Stages, a multiple of the ranks.
        num_ranks: Ranks.
        is_v: Whether every second round goes backwards.
    """
    rounds = (divmod(index, num_ranks) for index in range(count))
    return tuple(num_ranks - 1 - place if is_v and lap % 2 else place for lap, place in rounds)


def balance(costs: Sequence[float], count: int, *, before: float = 0.0, after: float = 0.0) -> tuple[int, ...]:
    """Blocks of each stage, such that the dearest stage is as cheap as can be and the others are about even.

    Args:
        costs: Cost of each block, in order; at least one a stage.
        count: Stages.
        before: Cost of what the first stage has beside its blocks.
        after: Cost of what the last stage has beside its blocks.
    """
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
