"""Reads published results and holds predictions against them."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from parallel import ParallelConfig, Precision
from parallel.config import ReduceGradients, Schedule
from parallel.plan import ModelShape
from parallel.planner.candidate import Candidate
from parallel.planner.constants import CONSTANTS, Constants
from parallel.planner.costs import KEEP_ALL, KEEP_HALF, KEEP_INPUT, model_costs
from parallel.planner.enumeration import NAMED
from parallel.planner.hardware import find_gpu
from parallel.planner.memory import Logits, predict_memory
from parallel.planner.ranking import UNVALIDATED
from parallel.planner.timing import predict_time
from parallel.planner.waiting import join_ranks
from recipes.plan.models import find_shape

RECOMPUTES = {"none": KEEP_ALL, "selective-op": KEEP_HALF, "selective": KEEP_HALF, "full": KEEP_INPUT}


class Source(NamedTuple):
    """What is known of how a source ran, where it is not what most do.

    Sources do not say all of this. For the one below it is inferred from the very figures that are then predicted, so
    that it makes errors of these rows look smaller: their memory is that of gradients which stay whole over the
    accumulation steps (4 bytes a parameter over tp) and of no whole logits, and what is allocated, where the others
    publish what is reserved.

    Attributes:
        gpus_per_node: GPUs of a node; None: as the table says.
        reduces_last: Whether gradients stay whole until the last micro-batch.
        chunks_logits: Whether the loss holds a chunk of the logits at a time.
        reports_allocated: Whether memory is what is allocated.
    """

    gpus_per_node: int | None = None
    reduces_last: bool = False
    chunks_logits: bool = False
    reports_allocated: bool = False


SOURCES = {
    "KempnerForge": Source(gpus_per_node=4, reduces_last=True, chunks_logits=True, reports_allocated=True),
}
"""What is known of sources by name."""


class Row(NamedTuple):
    """One published result.

    Attributes:
        source: Where it was published.
        name: What was run, in a few words.
        tokens_per_s: Of each GPU.
        memory_gib: Peak of a GPU; None: not published.
        candidate: How it was run.
        shape: The model.
        gpu: The kind of GPU.
        sequence_length: Tokens of a sequence.
        unknown: What was in use that no constant knows.
    """

    source: str
    name: str
    tokens_per_s: float
    memory_gib: float | None
    candidate: Candidate
    shape: ModelShape
    gpu: str
    sequence_length: int
    unknown: tuple[str, ...]


class Errors(NamedTuple):
    """What is predicted for a row.

    Attributes:
        row: The row.
        tokens_per_s: Predicted, of each GPU.
        speed_error: Relative.
        memory_gib: Predicted.
        memory_error: Relative; None where no memory is published.
        unvalidated: Axes of it that none of the fitted rows has, and what no constant knows.
    """

    row: Row
    tokens_per_s: float
    speed_error: float
    memory_gib: float
    memory_error: float | None
    unvalidated: tuple[str, ...]


def read_rows(path: str | None = None) -> list[Row]:
    """The rows of a table.

    Args:
        path: CSV file with the columns of the one that comes with the package; None: that one.

    Raises:
        ValueError: If a row names what is unknown, or lacks a column.
        OSError: If the file cannot be read.
    """
    shipped = files("recipes.plan").joinpath("published_rows.csv")
    text = (shipped if path is None else Path(path)).read_text(encoding="utf-8")
    rows: list[Row] = []
    for number, values in enumerate(csv.DictReader(text.splitlines()), start=2):
        try:
            rows.append(_row(values))
        except (KeyError, TypeError, ValueError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"line {number} of {path or 'the published rows'}: {what}") from error
    return rows


def _row(values: Mapping[str, str]) -> Row:
    pp, cp, replicas, shards = (int(values[name] or 1) for name in ("pp", "cp", "dp_replicate", "dp_shard"))
    hybrid = replicas > 1 and shards > 1
    config = ParallelConfig(
        pp=pp,
        dp_replicate=replicas,
        dp_shard=shards,
        cp=cp,
        tp=int(values["tp"] or 1),
        data_parallel="ddp" if shards * cp == 1 and replicas > 1 else "fsdp2",
        strategy="hybrid_shard" if hybrid else None,
        cp_method="ring" if cp > 1 else None,
        schedule=_schedule(values["schedule"] or "1f1b") if pp > 1 else None,
        precision=Precision(compute="bfloat16", reduce="float32"),
        compile=values["compile"] == "yes",
    )
    last = SOURCES.get(values["source"], Source()).reduces_last or pp > 1
    local, times = int(values["local_batch"]), int(values["grad_accum"] or 1)
    # A pipeline cuts the batch of a rank into sequences.
    local, times = (1, local * times) if pp > 1 else (local, times)
    when: ReduceGradients = "last" if last else "every_micro_batch"
    candidate = Candidate(config, RECOMPUTES[values["activation_checkpoint"]], when, local, times)
    axes = " ".join(f"{axis} {getattr(config, axis)}" for axis in ("pp", "cp", "tp") if getattr(config, axis) > 1)
    name = f"{values['model']} on {values['num_gpus']} {axes}{' compiled' if config.compile else ''}"
    memory = float(values["memory_gib"]) if values["memory_gib"] else None
    shape, length = find_shape(values["model"]), int(values["seq_len"])
    speed = float(values["tokens_per_s_per_gpu"])
    special = {"matmul_dtype": "bf16", "async_tp": "no"}
    unknown = tuple(f"{name} {values[name]}" for name, usual in special.items() if (values.get(name) or usual) != usual)
    return Row(values["source"], name, speed, memory, candidate, shape, values["gpu"], length, unknown)


def _schedule(name: str) -> Schedule:
    """The schedule of a name that is written in some way."""
    plain = {known.replace("_", ""): known for known in NAMED}
    letters = "".join(each for each in name.lower() if each.isalnum())
    if letters not in plain:
        raise ValueError(f"unknown schedule {name!r}; legal: {', '.join(NAMED)}")
    return plain[letters]


def errors(row: Row, constants: Constants = CONSTANTS) -> Errors:
    """What is predicted for a row.

    Args:
        row: A published result.
        constants: With which it is predicted.

    Raises:
        ValueError: If its GPU is unknown.
    """
    gpu, source = find_gpu(row.gpu), SOURCES.get(row.source, Source())
    gpu = replace(gpu, gpus_per_node=source.gpus_per_node or gpu.gpus_per_node)
    costs, candidate = model_costs(row.shape), row.candidate
    config = candidate.config
    ranks = join_ranks(config, gpu, constants)
    time = predict_time(costs, candidate, row.sequence_length, gpu, constants, ranks)
    sequences = candidate.micro_batch * candidate.num_micro_batches
    tokens_per_s = sequences * row.sequence_length / time.step_s / (config.tp * config.cp * config.pp)
    logits: Logits = "chunked" if source.chunks_logits else "eager"
    predicted = predict_memory(costs, candidate, row.sequence_length, constants, logits)
    memory = (predicted.allocated if source.reports_allocated else predicted.reserved) / 2**30
    memory_error = None if row.memory_gib is None else memory / row.memory_gib - 1
    unvalidated = (*(axis for axis in UNVALIDATED if getattr(config, axis) > 1), *row.unknown)
    return Errors(row, tokens_per_s, tokens_per_s / row.tokens_per_s - 1, memory, memory_error, unvalidated)


def summary(found: Sequence[Errors]) -> tuple[float, float, float | None, float | None]:
    """Median and largest error of speed, and of memory where any is published.

    Args:
        found: Of some rows.
    """
    speed = [abs(each.speed_error) for each in found]
    memory = [abs(each.memory_error) for each in found if each.memory_error is not None]
    of_memory = (statistics.median(memory), max(memory)) if memory else (None, None)
    return (statistics.median(speed), max(speed), *of_memory)
