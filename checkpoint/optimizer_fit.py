"""Compares the optimizer of a checkpoint with the one that it is to be loaded into."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from checkpoint.optimizer_state import PREFIX, SWITCHES, OptimizerState, split_name


def optimizer_differences(
    saved: Mapping[str, Any], current: OptimizerState, elsewhere: Collection[str] = ()
) -> list[str]:
    """How a saved optimizer differs from one that is there, in class, groups and hyperparameters.

    Values of numbers may differ, since a load takes them over. Booleans may not: they choose another algorithm.

    Args:
        saved: `optimizer` of a manifest's header, trusted in nothing.
        current: The optimizer to load into.
        elsewhere: Fqns of parameters that optimizers of other ranks hold.

    Returns:
        One line for each difference; empty if the optimizer can go on from what was saved.
    """
    groups: Any = saved.get("groups")
    if not _well_formed(groups):
        return ["the checkpoint's optimizer groups are malformed"]
    lines = _class_differences(saved.get("class"), current.class_name) + _split_differences(
        groups, current.groups, elsewhere
    )
    if lines:
        # Hyperparameters of another class or of other groups have nothing to be held against.
        return lines
    return [
        f"group {index}.{line}"
        for index, (before, now) in enumerate(zip(groups, current.groups, strict=True))
        for line in _hyperparameter_differences(before["hyperparameters"], now["hyperparameters"])
    ]


def uneven_entries(
    names: Iterable[str], groups: Iterable[Mapping[str, Any]], num_dims: Mapping[str, int]
) -> tuple[list[str], list[str]]:
    """Finds saved state that one parameter has otherwise than its like.

    An optimizer keeps the same entries for all parameters of a group that it has stepped. Only the number of dims
    may make a difference: Adafactor factors the state of matrices alone.

    Args:
        names: `optimizer.<fqn>.<entry>` of all saved state.
        groups: Each with `params`, fqns.
        num_dims: Fqn -> dims of the parameter.

    Returns:
        Names that are missing, and names that are too many, each by what most parameters of their kind have.
    """
    entries: dict[str, set[str]] = defaultdict(set)
    for name in names:
        fqn, entry = split_name(name)
        entries[fqn].add(entry)
    missing: list[str] = []
    unexpected: list[str] = []
    for group in groups:
        alike: dict[int, list[str]] = defaultdict(list)
        for fqn in group["params"]:
            if fqn in entries:
                alike[num_dims[fqn]].append(fqn)
        for fqns in alike.values():
            counts = Counter(entry for fqn in fqns for entry in entries[fqn])
            usual = {entry for entry, count in counts.items() if 2 * count >= len(fqns)}
            missing += [f"{PREFIX}{fqn}.{entry}" for fqn in fqns for entry in sorted(usual - entries[fqn])]
            unexpected += [f"{PREFIX}{fqn}.{entry}" for fqn in fqns for entry in sorted(entries[fqn] - usual)]
    return missing, unexpected


def _well_formed(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(fqn, str) for fqn in group["params"])
        and isinstance(group.get("hyperparameters"), dict)
        for group in groups
    )


def _class_differences(saved: Any, current: str) -> list[str]:
    if saved is None:
        return [
            f"the checkpoint does not say of which class its optimizer is, needed {current}; it is of an earlier "
            "release: load its parts `model`, `progress` and `rng` alone"
        ]
    return [] if saved == current else [f"class {saved} in the checkpoint, {current} in the optimizer"]


def _split_differences(
    saved: list[dict[str, Any]], current: list[dict[str, Any]], elsewhere: Collection[str]
) -> list[str]:
    before = {fqn: index for index, group in enumerate(saved) for fqn in group["params"] if fqn not in elsewhere}
    now = {fqn: index for index, group in enumerate(current) for fqn in group["params"]}
    lines = [
        f"{fqn}: group {before.get(fqn, 'none')} in the checkpoint, group {now.get(fqn, 'none')} in the optimizer"
        for fqn in sorted(before.keys() | now.keys())
        if before.get(fqn) != now.get(fqn)
    ]
    if not lines and len(saved) != len(current):
        lines = [f"{len(saved)} groups in the checkpoint, {len(current)} in the optimizer"]
    return lines


def _hyperparameter_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    names = [name for name in dict.fromkeys([*current, *saved]) if name not in SWITCHES]
    lines = []
    for name in names:
        if name not in saved or name not in current:
            lines.append(f"{name}: {'in the optimizer only' if name in current else 'in the checkpoint only'}")
        elif not _alike(saved[name], current[name]):
            lines.append(f"{name}: {saved[name]!r} in the checkpoint, {current[name]!r} in the optimizer")
    return lines


def _alike(saved: Any, current: Any) -> bool:
    """Whether a value can take another's place."""
    if isinstance(saved, bool) or isinstance(current, bool):
        return saved is current
    if isinstance(saved, int | float) and isinstance(current, int | float):
        return True
    if isinstance(saved, list) and isinstance(current, list):
        return len(saved) == len(current) and all(map(_alike, saved, current))
    if isinstance(saved, dict) and isinstance(current, dict):
        return saved.keys() == current.keys() and all(_alike(saved[key], current[key]) for key in saved)
    return type(saved) is type(current)
