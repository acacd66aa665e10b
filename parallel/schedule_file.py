"""Reads a pipeline schedule that is written down as a table."""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


class Action(NamedTuple):
    """What a rank does at one time.

    Attributes:
        stage: The stage that runs.
        kind: `F` forward, `B` backward, or its halves `I` for inputs and `W` for weights.
        micro_batch: The micro-batch, from 0.
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        """As it stands in the file."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class ScheduleFile:
    """A schedule that ranks can run to its end.

    Attributes:
        ranks: The rank of each stage.
        num_micro_batches: Micro-batches of a step.
        splits_backward: Whether gradients of weights are computed apart from those of inputs anywhere.
    """

    ranks: tuple[int, ...]
    num_micro_batches: int
    splits_backward: bool


def read_schedule(path: str) -> ScheduleFile:
    """Reads a CSV file with a row for each rank and in it what the rank does, in order: `0F0`, `0B0`, ...

    A cell names the stage, the kind of work (see `Action`) and the micro-batch; an empty one is a pause, and
    `(0F1;1B0)OVERLAP_F_B` a forward and a backward that may overlap. What stages send each other is not written down.

    Args:
        path: The file.

    Raises:
        ValueError: If it cannot be read, or ranks that follow it would not come to its end.
    """
    try:
        status = Path(path).stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"the schedule in {path!r} cannot be read: {error}; give schedule_file a CSV file") from error


@lru_cache(maxsize=8)
def _read(path: str, _changed_ns: int, _size: int) -> ScheduleFile:
    with Path(path).open(newline="", encoding="ascii") as file:
        rows = [list(_actions(path, rank, row)) for rank, row in enumerate(csv.reader(file))]
    ranks = _ranks(path, rows)
    micro_batches = 1 + max(each.micro_batch for row in rows for each in row)
    _check_complete(path, rows, len(ranks), micro_batches)
    _check_ends(path, rows, len(ranks))
    splits = any(each.kind == "I" for row in rows for each in row)
    return ScheduleFile(ranks=ranks, num_micro_batches=micro_batches, splits_backward=splits)


def _actions(path: str, rank: int, row: Sequence[str]) -> Iterator[Action]:
    for column, text in enumerate(row):
        overlap = _OVERLAP.fullmatch(text.strip())
        for part in overlap.groups() if overlap else (text,):
            found = _CELL.fullmatch(part.strip())
            if found:
                yield Action(int(found[1]), found[2], int(found[3]))
            elif part.strip() or overlap:
                raise ValueError(
                    f"{path}, row {rank + 1}, column {column + 1}: {text!r} is no stage, kind (F, B, I or W) and "
                    "micro-batch such as 0F0"
                )


def _ranks(path: str, rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    found: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if not row:
            raise ValueError(f"{path}: rank {rank} (row {rank + 1}) does nothing; each rank runs a stage or more")
        for action in row:
            if found.setdefault(action.stage, rank) != rank:
                raise ValueError(f"{path}: stage {action.stage} is on ranks {found[action.stage]} and {rank}")
    missing = sorted(set(range(1 + max(found, default=-1))) - set(found))
    if missing or not found:
        raise ValueError(f"{path}: no rank runs stages {missing[:5] or [0]}; number them from 0 without gaps")
    return tuple(rank for _, rank in sorted(found.items()))


def _check_complete(path: str, rows: Sequence[Sequence[Action]], num_stages: int, micro_batches: int) -> None:
    counts: dict[Action, int] = {}
    for action in (each for row in rows for each in row):
        counts[action] = counts.get(action, 0) + 1
        if counts[action] > 1:
            raise ValueError(f"{path}: {action} stands there twice")
    for stage in range(num_stages):
        for micro_batch in range(micro_batches):
            has = {kind for kind in "FBIW" if Action(stage, kind, micro_batch) in counts}
            if has not in ({"F", "B"}, {"F", "I", "W"}):
                raise ValueError(
                    f"{path}: stage {stage} does {sorted(has) or 'nothing'} for micro-batch {micro_batch} of "
                    f"{micro_batches}; it needs F and B, or F, I and W"
                )


def _check_ends(path: str, rows: Sequence[Sequence[Action]], num_stages: int) -> None:
    """Goes through the schedule as ranks would, each waiting for what it needs."""
    done: set[Action] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and all(needed & done for needed in _needs(row[at[rank]], num_stages)):
                done.add(row[at[rank]])
                at[rank] += 1
                moved = True
    stuck = [f"rank {rank} before {row[at[rank]]}" for rank, row in enumerate(rows) if at[rank] < len(row)]
    if stuck:
        raise ValueError(f"{path}: ranks would wait for each other for ever: {', '.join(stuck[:4])}")


def _needs(action: Action, num_stages: int) -> Iterator[set[Action]]:
    """What must be done before an action; of each set one."""
    stage, kind, micro_batch = action
    if kind == "F":
        if stage:
            yield {Action(stage - 1, "F", micro_batch)}
    elif kind == "W":
        yield {Action(stage, "I", micro_batch)}
    else:
        yield {Action(stage, "F", micro_batch)}
        if stage < num_stages - 1:
            yield {Action(stage + 1, each, micro_batch) for each in "BI"}
