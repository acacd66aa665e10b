"""Enumerates every legal layout of a model on some GPUs, the most promising degrees first."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, get_args

from parallel.block_rules import breaks_graph
from parallel.config import (
    ContextParallelMethod,
    DataParallel,
    ParallelConfig,
    ReduceGradients,
    Schedule,
    Sharding,
    Strategy,
)
from parallel.float8 import check_whole_matrices
from parallel.layout import check_layout, check_sequence_length
from parallel.plan import ModelShape
from parallel.planner.bounds import Degrees, Kind
from parallel.planner.candidate import Candidate, Request, precision_of
from parallel.planner.costs import KEEP_ALL, KEEP_INPUT, RECOMPUTES
from parallel.planner.legality import is_legal, is_legal_layout, runs
from parallel.schedules import SCHEDULES, traits_of
from parallel.traits import TRAITS

NAMED: tuple[Schedule, ...] = tuple(SCHEDULES)  # type: ignore[arg-type]  # keys are names that Schedule lists
_DEFAULTS = dict(vars(ParallelConfig()))
METHODS: tuple[ContextParallelMethod, ...] = get_args(ContextParallelMethod)


def legal_degrees(request: Request) -> list[Degrees]:
    """All degrees that multiply to the GPUs, fit the model, and give every data-parallel rank as many sequences.

    Args:
        request: What is to be trained on what.
    """
    world, batch, shape, length = request.num_gpus, request.global_batch, request.shape, request.sequence_length
    found: list[Degrees] = []
    for tp in divisors(world):
        if not _splits_legally(shape, length, tp=tp, precision=precision_of(request.compute)):
            continue
        for pp in divisors(world // tp):
            if pp > 1 and not any(_splits_legally(shape, length, pp=pp, schedule=each) for each in NAMED):
                continue
            for cp in divisors(world // tp // pp):
                if cp > 1 and not any(_splits_legally(shape, length, tp=tp, cp=cp, cp_method=each) for each in METHODS):
                    continue
                ranks = world // (tp * pp * cp)
                if batch % ranks == 0:
                    found += [Degrees(pp, ranks // shard, shard, cp, tp) for shard in divisors(ranks)]
    return found


def layouts(
    request: Request, degrees: Degrees, schedule: Schedule | None, fits: Callable[[Kind], bool]
) -> Iterator[ParallelConfig]:
    """The legal layouts of some degrees and a schedule, each with what varies within it at its default.

    Args:
        request: What is to be trained on what.
        degrees: Ranks along each axis.
        schedule: Of the pipeline.
        fits: Says of a backend and strategy whether it may fit; others are skipped.
    """
    return (config for config in possible_layouts(request, degrees, schedule, fits) if is_accepted(request, config))


def possible_layouts(
    request: Request, degrees: Degrees, schedule: Schedule | None, fits: Callable[[Kind], bool]
) -> Iterator[ParallelConfig]:
    """Layouts that have not been held against all rules: checking them takes longer than to see that most are slow.

    Args:
        request: What is to be trained on what.
        degrees: Ranks along each axis.
        schedule: Of the pipeline.
        fits: Says of a backend and strategy whether it may fit; others are skipped.
    """
    ways = _ways(request.shape, request.sequence_length, degrees.tp, degrees.cp)
    splits_backward = schedule is not None and SCHEDULES[schedule].splits_backward
    compiles = request.compile and not splits_backward
    axes = degrees._asdict() | {"schedule": schedule, "compile": compiles, "precision": precision_of(request.compute)}
    for kind in filter(fits, kinds(degrees)):
        refused = TRAITS[kind.data_parallel].refused_axes
        if any(getattr(degrees, axis, 1) > 1 for axis in refused):
            continue
        for method, sequence_parallel in ways:
            for ep in _expert_degrees(request, degrees):
                yield _unchecked(
                    axes
                    | {
                        "data_parallel": kind.data_parallel,
                        "strategy": kind.strategy,
                        "cp_method": method,
                        "sequence_parallel": sequence_parallel,
                        "ep": ep,
                        "sharding": _sharding(kind.offloads),
                    }
                )


def is_accepted(request: Request, config: ParallelConfig) -> bool:
    """Whether `parallel` takes a layout.

    Args:
        request: What is to be trained on what.
        config: One of `possible_layouts`.
    """
    return is_legal(lambda: config.__post_init__()) and is_legal_layout(
        config, request.shape, request.sequence_length, request.gpu.device
    )


def candidates(request: Request, config: ParallelConfig, micro_batch: int) -> tuple[tuple[Candidate, ...], ...]:
    """All that a layout can be run with at one micro-batch: rows of them from the fastest, which holds most.

    Args:
        request: What is to be trained on what.
        config: The layout.
        micro_batch: Sequences of a micro-batch, which divide those of a rank.
    """
    times = request.global_batch // (config.dp_replicate * config.dp_shard * micro_batch)
    if config.schedule is not None and not runs(config.schedule, config.pp, times):
        return ()
    # Where a block is no one graph, or is gone through twice, no policy can choose among its ops.
    has_experts = request.shape.num_experts > 0
    in_parts = traits_of(config).splits_backward or breaks_graph(config, has_experts=has_experts)
    recomputes = (KEEP_ALL, KEEP_INPUT) if in_parts else RECOMPUTES
    return tuple(
        tuple(Candidate(config, each, when, micro_batch, times) for each in recomputes)
        for when in _whens(config, times)
    )


def schedules(degrees: Degrees) -> tuple[Schedule | None, ...]:
    """The schedules of a pipeline; None where there is no pipeline.

    Args:
        degrees: Ranks along each axis.
    """
    return NAMED if degrees.pp > 1 else (None,)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number, the smallest first.

    Args:
        number: A positive integer.
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(small + [number // each for each in reversed(small) if each * each != number])


def kinds(degrees: Degrees) -> Iterator[Kind]:
    """Backends with strategies that degrees leave, plain ones first.

    DataParallel, which is one process, is none of them: it has no ranks.

    Args:
        degrees: Ranks along each axis.
    """
    if degrees == (1, 1, 1, 1, 1):
        yield Kind("none", None)
        return
    named: tuple[DataParallel, ...] = get_args(DataParallel)
    if degrees.dp_shard == 1:
        yield from (Kind(name, None) for name in named if TRAITS[name].has_buckets)
        yield Kind("fsdp2", "no_shard")
    if degrees.dp_shard * degrees.cp == 1:
        return
    # In a pipeline units stay gathered whatever the strategy.
    hybrid: tuple[Strategy, ...] = ("hybrid_shard", "hybrid_shard_zero2")
    plain: tuple[Strategy, ...] = ("full_shard", "shard_grad_op")
    for strategy in (hybrid if degrees.dp_replicate > 1 else plain)[: 1 if degrees.pp > 1 else 2]:
        for name in reversed(named):
            if TRAITS[name].shards:
                yield from (Kind(name, strategy, offloads) for offloads in (False, True))


def _whens(config: ParallelConfig, num_micro_batches: int) -> tuple[ReduceGradients, ...]:
    """When gradients can be summed over ranks; where nothing else is legal, as the backend does by default."""
    if not TRAITS[config.data_parallel].shards or config.pp > 1:
        return ("last",)
    if num_micro_batches == 1:
        return ("every_micro_batch",)
    if TRAITS[config.data_parallel].flattens and (config.tp > 1 or config.sharding.cpu_offload):
        return ("last",) if config.sharding.cpu_offload else ("every_micro_batch",)
    return ("every_micro_batch", "last")


def _expert_degrees(request: Request, degrees: Degrees) -> tuple[int, ...]:
    experts = request.shape.num_experts
    if not experts:
        return (1,)
    return tuple(each for each in divisors(degrees.dp_shard * degrees.cp) if experts % each == 0)


def _unchecked(fields: Mapping[str, Any]) -> ParallelConfig:
    """A config whose fields have not been held against each other; `is_accepted` does that."""
    config = object.__new__(ParallelConfig)
    config.__dict__.update(_DEFAULTS, **fields)
    return config


@lru_cache(maxsize=256)
def _ways(shape: ModelShape, length: int, tp: int, cp: int) -> tuple[tuple[ContextParallelMethod | None, bool], ...]:
    """Methods of context parallel, and with sequence parallel or without, that fit model and sequence."""
    methods = METHODS if cp > 1 else (None,)
    return tuple(
        (method, sequence_parallel)
        for method in methods
        for sequence_parallel in ((True, False) if tp > 1 else (True,))
        if _splits_legally(shape, length, tp=tp, cp=cp, cp_method=method, sequence_parallel=sequence_parallel)
    )


def _splits_legally(shape: ModelShape, length: int, **axes: object) -> bool:
    """Whether some axes alone fit the model and the sequence, with sequence parallel or without."""

    def check() -> None:
        config = ParallelConfig(dp_shard=1, **({"sequence_parallel": False} | axes))  # type: ignore[arg-type]  # by name
        check_layout(config, shape)
        check_sequence_length(config, length, shape)
        check_whole_matrices(config)

    return is_legal(check)


@lru_cache
def _sharding(offloads: bool) -> Sharding:
    return Sharding(cpu_offload=offloads)
