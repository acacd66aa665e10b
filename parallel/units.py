"""Chooses the modules whose parameters travel in one all-gather."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from parallel.config import Sharding
from parallel.plan import ParallelPlan, Unit, matching

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def choose_units(model: nn.Module, plan: ParallelPlan, sharding: Sharding) -> tuple[Unit, ...]:
    """The units that a config asks for, besides the root, which takes what is left.

    Args:
        model: The whole model.
        plan: Its own units, and its tied parameters.
        sharding: How units are chosen.
    """
    if sharding.units == "model":
        return ()
    if sharding.units == "size":
        return units_by_size(model, sharding.unit_min_parameters, tied=plan.tied)
    return plan.units


def with_expert_units(model: nn.Module, plan: ParallelPlan, units: Sequence[Unit]) -> tuple[Unit, ...]:
    """The units where ep splits experts: these become units of their own, which other ranks share than the rest.

    Args:
        model: The whole model.
        plan: Names the modules that hold experts.
        units: Units without regard to ep.
    """
    modules = dict(model.named_modules())
    experts = [fqn for pattern in plan.experts for fqn in matching(pattern, modules)]
    chosen: list[Unit] = []
    for unit in units:
        inside = [fqn for fqn in experts if any(f"{fqn}.".startswith(f"{each}.") for each in unit.modules)]
        rest = tuple(fqn for fqn in unit.modules if fqn not in inside)
        # Before the unit around them, which fully_shard gives what is left.
        chosen += [Unit(modules=(fqn,), view="expert_fsdp") for fqn in inside]
        chosen += [replace(unit, modules=rest)] if rest else []
        experts = [fqn for fqn in experts if fqn not in inside]
    return (*chosen, *(Unit(modules=(fqn,), view="expert_fsdp") for fqn in experts))


def kept_unit(units: Sequence[Unit], sharding: Sharding) -> Unit | None:
    """The unit that stays gathered from forward to backward where the others do not.

    Args:
        units: In the order in which they run.
        sharding: Whether there is one.
    """
    needed = [unit for unit in units if unit.backward_needs_weights]
    return needed[-1] if needed and sharding.keep_last_unit else None


def modules_in_root(model: nn.Module, units: Sequence[Unit]) -> dict[str, nn.Module]:
    """Modules below the root whose own parameters no unit takes, by fqn.

    Args:
        model: The whole model.
        units: Its units.
    """
    within = tuple(f"{fqn}." for unit in units for fqn in unit.modules)
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if fqn and not f"{fqn}.".startswith(within) and next(module.parameters(recurse=False), None) is not None
    }


def units_by_size(model: nn.Module, min_parameters: int, *, tied: tuple[tuple[str, ...], ...] = ()) -> tuple[Unit, ...]:
    """A unit for each module that holds enough parameters besides those of the units within it.

    Args:
        model: The whole model.
        min_parameters: Fewest parameters of a unit.
        tied: Groups of tied parameters; modules that hold one stay in the root, since a parameter has one unit.
    """
    kept = {name for names in tied for name in names}
    units: list[Unit] = []

    def visit(module: nn.Module, fqn: str) -> int:
        """Makes units of what lies in a module; returns the parameters that are left for the units around it."""
        left = sum(visit(child, f"{fqn}.{name}" if fqn else name) for name, child in module.named_children())
        left += sum(parameter.numel() for parameter in module.parameters(recurse=False))
        holds_tied = any(name.startswith(f"{fqn}.") for name in kept)
        if fqn and left >= min_parameters and not holds_tied and not isinstance(module, _WITHOUT_FORWARD):
            units.append(Unit(modules=(fqn,)))
            return 0
        return left

    visit(model, "")
    return tuple(units)


def units_where(model: nn.Module, predicate: Callable[[str, nn.Module], bool]) -> tuple[Unit, ...]:
    """A unit for each module that a predicate picks, for use as a plan's units; inner modules come first.

    Args:
        model: The whole model.
        predicate: Called with fqn and module; the root is not asked.

    Raises:
        ValueError: If it picks a module that has no forward, whose parameters would never be gathered.
    """

    def inner_first(module: nn.Module, fqn: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            yield from inner_first(child, f"{fqn}.{name}" if fqn else name)
        if fqn:
            yield fqn, module

    picked = [(fqn, module) for fqn, module in inner_first(model, "") if predicate(fqn, module)]
    containers = [fqn for fqn, module in picked if isinstance(module, _WITHOUT_FORWARD)]
    if containers:
        raise ValueError(f"{containers} are containers without a forward and cannot be units; pick their children")
    return tuple(Unit(modules=(fqn,)) for fqn, _ in picked)
