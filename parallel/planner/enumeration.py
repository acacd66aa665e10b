"""Enumerates every legal layout of a model on some GPUs, the most promising degrees first."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, get_args

from parallel.config import (
    ContextParallelMethod,
    DataParallel,
    ParallelConfig,
    ReduceGradients,
    Schedule,
    Sharding,
    Strategy,
)
from parallel.layout import check_layout, check_sequence_length
from parallel.plan import ModelShape
from parallel.planner.bounds import Degrees, Kind
from parallel.planner.candidate import Candidate, Request
from parallel.planner.costs import KEEP_ALL, KEEP_INPUT, RECOMPUTES
from parallel.planner.legality import is_legal, is_legal_layout, runs
from parallel.precision import Precision
from parallel.schedules import SCHEDULES, traits_of
from parallel.traits import TRAITS

WORTHWHILE: tuple[Schedule, ...] = tuple(each for each in SCHEDULES if each != "gpipe")  # type: ignore[misc]
METHODS: tuple[ContextParallelMethod | None, ...] = get_args(ContextParallelMethod)


def legal_degrees(request: Request) -> list[Degrees]:
    """All degrees that multiply to the GPUs, fit the model, and give every data-parallel rank as many sequences.

    Args:
        request: What is to be trained on what.
    """
    world, batch = request.num_gpus, request.global_batch
    found: list[Degrees] = []
    for tp in divisors(world):
        if not _splits_legally(request, tp=tp):
            continue
        for pp in divisors(world // tp):
            if pp > 1 and not any(_splits_legally(request, pp=pp, schedule=each) for each in WORTHWHILE):
                continue
            for cp in divisors(world // tp // pp):
                if cp > 1 and not any(_splits_legally(request, tp=tp, cp=cp, cp_method=each) for each in METHODS):
                    continue
                ranks = world // (tp * pp * cp)
                if batch % ranks == 0:
                    found += [Degrees(pp, ranks // shard, shard, cp, tp) for shard in divisors(ranks)]
    return found


def layouts(
    request: Request, degrees: Degrees, schedule: Schedule | None, fits: Callable[[Kind], bool]
) -> Iterator[ParallelConfig]:
    """The legal layouts of some degrees and a schedule, each with no activation checkpointing.

    Left out is what can be no better than another: fsdp1, of which the same is predicted as of fsdp2; gpipe, which
    holds more than 1f1b; shard_grad_op in a pipeline, where full_shard keeps units gathered too; no sequence parallel
    where it is legal.

    Args:
        request: What is to be trained on what.
        degrees: Ranks along each axis.
        schedule: Of the pipeline.
        fits: Says of a backend and strategy whether it may fit; others are skipped.
    """
    methods = METHODS if degrees.cp > 1 else (None,)
    for kind in filter(fits, _kinds(degrees)):
        for method in methods:
            for sequence_parallel in (True, False) if degrees.tp > 1 else (True,):
                config = _layout(request, degrees, kind, schedule, method, sequence_parallel)
                if config is not None:
                    yield config
                    break


def candidates(request: Request, config: ParallelConfig, micro_batch: int) -> tuple[tuple[Candidate, ...], ...]:
    """All that a layout can be run with at one micro-batch: rows of them from the fastest, which holds most.

    Args:
        request: What is to be trained on what.
        config: The layout.
        micro_batch: Sequences of a micro-batch, which divide those of a rank.
    """
    times = request.global_batch // (config.dp_replicate * config.dp_shard * micro_batch)
    if config.schedule is not None and not _runs(config.schedule, config.pp, times):
        return ()
    recomputes = (KEEP_ALL, KEEP_INPUT) if traits_of(config).splits_backward else RECOMPUTES
    whens: tuple[ReduceGradients, ...] = ("last",)
    if TRAITS[config.data_parallel].shards and config.pp == 1:
        whens = ("every_micro_batch", "last") if times > 1 else ("every_micro_batch",)
    return tuple(tuple(Candidate(config, each, when, micro_batch, times) for each in recomputes) for when in whens)


def schedules(degrees: Degrees) -> tuple[Schedule | None, ...]:
    """The schedules of a pipeline that may be best; None where there is no pipeline.

    Args:
        degrees: Ranks along each axis.
    """
    return WORTHWHILE if degrees.pp > 1 else (None,)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number, the smallest first.

    Args:
        number: A positive integer.
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(small + [number // each for each in reversed(small) if each * each != number])


def _kinds(degrees: Degrees) -> Iterator[Kind]:
    if degrees == (1, 1, 1, 1, 1):
        yield Kind("none", None)
        return
    sharded = degrees.dp_shard * degrees.cp > 1
    if sharded and degrees.dp_replicate == 1:
        yield Kind("fsdp2", "full_shard")
        if degrees.pp == 1:
            yield from (Kind("fsdp2", "shard_grad_op"), Kind("fsdp2", "full_shard", True))
    if sharded and degrees.dp_replicate > 1:
        yield Kind("fsdp2", "hybrid_shard")
        if degrees.pp == 1:
            yield Kind("fsdp2", "hybrid_shard_zero2")
    if degrees.dp_shard == 1:
        yield from (Kind("ddp", None), Kind("zero1", None), Kind("fsdp2", "no_shard"))


def _layout(
    request: Request,
    degrees: Degrees,
    kind: Kind,
    schedule: Schedule | None,
    method: ContextParallelMethod | None,
    sequence_parallel: bool,
) -> ParallelConfig | None:
    """One layout, None where it is not legal."""
    splits_backward = schedule is not None and SCHEDULES[schedule].splits_backward
    group = max(2, request.gpu.gpus_per_node // degrees.tp) if kind.in_node else None
    try:
        config = ParallelConfig(
            pp=degrees.pp,
            dp_replicate=degrees.dp_replicate,
            dp_shard=degrees.dp_shard,
            cp=degrees.cp,
            tp=degrees.tp,
            data_parallel=kind.data_parallel,
            strategy=kind.strategy,
            schedule=schedule,
            cp_method=method,
            sequence_parallel=sequence_parallel,
            precision=_precision(request.reduce),
            compile=request.compile and not splits_backward,
            sharding=_sharding(group),
        )
        check_layout(config, request.shape)
        check_sequence_length(config, request.sequence_length, request.shape)
        check_built(config)
    except ValueError:
        return None
    return config


def _splits_legally(request: Request, **axes: object) -> bool:
    """Whether some axes alone fit the model and the sequence, with sequence parallel or without."""

    def check() -> None:
        config = ParallelConfig(dp_shard=1, sequence_parallel=False, **axes)  # type: ignore[arg-type]  # fields by name
        check_layout(config, request.shape)
        check_sequence_length(config, request.sequence_length, request.shape)

    return _is_legal(check)


@lru_cache(maxsize=65536)
def _runs(schedule: Schedule, pp: int, num_micro_batches: int) -> bool:
    config = ParallelConfig(dp_shard=1, pp=pp, schedule=schedule)
    return _is_legal(lambda: check_micro_batches(config, num_micro_batches))


def _is_legal(check: Callable[[], None]) -> bool:
    try:
        check()
    except ValueError:
        return False
    return True


@lru_cache
def _precision(reduce: str) -> Precision:
    return Precision(compute="bfloat16", reduce="float32" if reduce == "float32" else "bfloat16")


@lru_cache
def _sharding(group: int | None) -> Sharding:
    return Sharding(reshard_group=group)
