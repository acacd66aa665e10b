"""Saves a training state from any mesh, and loads it onto any other."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from checkpoint import optimizer_state, save_plan, steps, writer
from checkpoint.candidates import Candidates
from checkpoint.canonical import MODEL_PREFIX
from checkpoint.differences import Differences
from checkpoint.fit import Fit
from checkpoint.load_options import PARTS, LoadOptions, Part
from checkpoint.manifest import Manifest
from checkpoint.ranks import Ranks
from checkpoint.reader import ShardReader
from checkpoint.restore import Restore
from checkpoint.retention import Retention
from checkpoint.save_plan import SavePlan
from checkpoint.selection import Keys
from checkpoint.state import FlatState, TrainState, flatten
from checkpoint.strict_json import digest, to_json

T = TypeVar("T")


def save(folder: str | os.PathLike[str], state: TrainState, retention: Retention | None = None) -> Path:
    """Writes a checkpoint, of which nothing is to be seen before it is complete; all ranks call this together.

    Every rank writes its own shards, replicated tensors are written once. The state is only read: the optimizer
    is not stepped, no generator advances.

    Args:
        folder: Where the run keeps its checkpoints, the same on all ranks; made if it is not there.
        state: What to save.
        retention: Which complete checkpoints stay when the new one is there; None keeps all.

    Returns:
        The new checkpoint, `folder/step-<8 digits>`. One of the same step is replaced.

    Raises:
        OSError: If a file cannot be written on some rank; all ranks raise it and earlier checkpoints stand.
        ValueError: If the state cannot be saved, or ranks differ in what is stored once.
    """
    ranks, folder = Ranks(), Path(folder)
    return commit(folder, plan(folder, state, ranks), retention, ranks)


def plan(folder: Path, state: TrainState, ranks: Ranks) -> SavePlan:
    """Finds what each rank writes; the first part of `save`, which looks at the state.

    Raises:
        ValueError: As `save`.
    """
    where = f"save into {folder}"

    def look() -> FlatState:
        return flatten(state, ranks.size)

    # Where tensors are made by all ranks together, all must have come that far.
    seen = None if state.trained.backend.holds_canonical else ranks.together(where, look)

    def plan_alone() -> tuple[FlatState, SavePlan]:
        flat = look() if seen is None else seen
        return flat, save_plan.plan_alone(flat, ranks)

    (flat, planned), alike = ranks.alike(where, plan_alone, lambda own: f"{_digest(own[0])} {own[1].digest}")
    if alike:
        return planned
    flat = _of_all_stages(flat, ranks)
    ranks.require_equal(flat.digests())
    return save_plan.plan(flat, ranks)


def _held(flat: FlatState) -> tuple[list[str], Mapping[str, Any] | None]:
    """Names of the parameters that a rank holds, and its optimizer."""
    held = sorted(name.removeprefix(MODEL_PREFIX) for name in flat.tensors if name.startswith(MODEL_PREFIX))
    return held, flat.header.optimizer


def _digest(flat: FlatState) -> str:
    """Equal where ranks hold the same parameters and are equal in all that is no tensor."""
    return digest(to_json([_held(flat)[0], flat.digests()], "state"))


def _of_all_stages(flat: FlatState, ranks: Ranks) -> FlatState:
    """The state with a header that describes the optimizer of all pipeline stages, where there are several."""
    own = _held(flat)
    parts = ranks.distinct(own, digest(to_json(own, "optimizer")))
    merged = optimizer_state.merge(list(parts.values())) if len(parts) > 1 else None
    return flat if merged is None else replace(flat, header=replace(flat.header, optimizer=merged))


def commit(folder: Path, planned: SavePlan, retention: Retention | None, ranks: Ranks) -> Path:
    """Writes what was planned; the second part of `save`, which another thread can do with a group of its own.

    Raises:
        OSError: As `save`.
    """
    step = planned.header.step
    where = f"save {folder / steps.step_name(step)}"
    temporary = ranks.on_coordinator(where, lambda: steps.prepare(folder, step))
    try:
        stored = ranks.collect(where, lambda: writer.write(temporary, planned, ranks.rank))

        def complete() -> Path:
            writer.seal(temporary, planned, stored)
            return steps.publish(temporary, step)

        written = ranks.on_coordinator(where, complete)
    except BaseException:
        if ranks.is_coordinator:
            steps.discard(temporary)
        raise
    if retention is not None:
        what = f"remove checkpoints older than {written}, which is complete"
        ranks.on_coordinator(what, partial(steps.prune, folder, retention, written))
    return written


@dataclass(frozen=True)
class Loaded:
    """What a load took.

    Attributes:
        manifest: The checkpoint's table of contents: the recipe and the layout that it was saved with, and so on.
        differences: What did not fit and was left as it was; nothing unless the load was not strict.
    """

    manifest: Manifest
    differences: Differences


def load(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    parts: Sequence[Part] = PARTS,
    keys: Keys = None,
    strict: bool = True,
    cast: bool = False,
) -> Loaded:
    """Fills a training state in place, whatever mesh wrote the checkpoint; all ranks call this together.

    Nothing of the state is changed unless all of the checkpoint fits it; only a file that turns out to be unreadable
    half-way leaves tensors partly filled. An optimizer that has not stepped yet gets the state that the checkpoint
    has. Every rank reads the slices that it needs.

    Args:
        path: One checkpoint, or the folder where a run keeps them, of which the newest is taken; where that turns out
            to be damaged or unreadable, with a warning the one before it.
        state: What to fill; its recipe is left alone.
        parts: Parts to fill: `model`, `optimizer`, `progress` (step, num_tokens and all that is stateful), `rng`.
        keys: Tensors of the parts to fill: patterns of names such as `model.blocks.0.*`, or a mapping of names in the
            state to names in the checkpoint. None: all.
        strict: Whether all of it must fit; otherwise what does not fit is left as it is, except that an optimizer is
            loaded whole or not at all.
        cast: Whether floating-point values are converted where the state has another dtype.

    Returns:
        The checkpoint's table of contents, and what did not fit.

    Raises:
        ValueError: If there is no complete checkpoint, or it does not fit the state: every entry that is missing,
            unexpected, of another shape or another dtype is listed, and how the optimizer is another one. Or if
            something stateful refuses its saved state, on any rank.
        OSError: If a file cannot be read.
    """
    options = LoadOptions(parts=parts, keys=keys, strict=strict, cast=cast)
    ranks, path = Ranks(), Path(path)
    candidates, failure = Candidates(path, ranks), None
    while True:
        found, manifest = candidates.next(failure)
        try:
            return _load(found, manifest, state, options, ranks)
        except (DamagedError, UnreadableError) as error:
            if found == path:
                raise
            warnings.warn(f"{error}; going back to the checkpoint before it", stacklevel=2)
            failure = error


class DamagedError(ValueError):
    """A checkpoint is not what was saved."""


class UnreadableError(OSError):
    """The file system does not hand out a checkpoint, or not to all ranks."""


def _load(found: Path, manifest: Manifest, state: TrainState, options: LoadOptions, ranks: Ranks) -> Loaded:
    where = f"load {found}"

    def read(action: Callable[[], T]) -> T:
        try:
            return ranks.together(where, action)
        except ValueError as error:
            raise DamagedError(str(error)) from error
        except OSError as error:
            raise UnreadableError(error.errno, str(error)) from error

    held = ranks.together(where, lambda: list(state.trained.named_parameters()))
    elsewhere = frozenset(chain(*ranks.distinct(held, digest(to_json(held, "parameters"))).values())) - set(held)
    fit, differences = ranks.together(where, lambda: _fit(found, Fit(state, manifest, options, elsewhere)))
    restore = Restore(fit, ranks)
    reads = read(lambda: ShardReader(found, manifest).prepare(restore.slices()))
    try:
        ranks.together(where, restore.begin)
        read(reads.run)
        ranks.together(where, restore.finish)
    except BaseException as error:
        restore.undo(error)
        raise
    return Loaded(manifest, differences)


def _fit(path: Path, fit: Fit) -> tuple[Fit, Differences]:
    differences = fit.check()
    refused = differences if fit.options.strict else differences.of_optimizer()
    if refused.describe():
        raise ValueError(f"{path} does not fit the state to load; nothing was changed\n{refused.describe()}")
    return fit, differences
