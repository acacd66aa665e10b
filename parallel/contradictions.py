"""Refuses fields of a ParallelConfig that contradict each other."""

from typing import TYPE_CHECKING

from parallel.schedules import FROM_FILE, LEGAL_SCHEDULES, check_split_backward
from parallel.traits import TRAITS, Traits

if TYPE_CHECKING:
    from parallel.config import ParallelConfig, Sharding

CONTEXT_PARALLEL_METHODS = "allgather, ring, ulysses"


def check_axes(config: "ParallelConfig") -> None:
    """Holds axes against the fields that only they give a meaning.

    Raises:
        ValueError: If one lacks the other.
    """
    if config.pp > 1 and config.schedule is None:
        raise ValueError(f"pp={config.pp} needs a schedule; legal: {LEGAL_SCHEDULES}")
    if config.pp == 1 and config.schedule is not None:
        raise ValueError(f"schedule={config.schedule!r} needs pipeline stages (pp > 1); pp is 1")
    if (config.schedule == FROM_FILE) != (config.schedule_file is not None):
        raise ValueError(
            f"schedule={config.schedule!r} with schedule_file={config.schedule_file!r}: a file goes with "
            f"schedule={FROM_FILE!r}, which needs one"
        )
    if config.async_tp and not (config.tp > 1 and config.sequence_parallel and config.compile):
        raise ValueError(
            f"async_tp=True overlaps what sequence_parallel sends over tp > 1 with matmuls of compiled blocks; tp is "
            f"{config.tp}, sequence_parallel is {config.sequence_parallel}, compile is {config.compile}: set them, or "
            "leave async_tp out"
        )
    _check_pipeline(config)
    if config.cp > 1 and config.cp_method is None:
        raise ValueError(f"cp={config.cp} needs a cp_method; legal: {CONTEXT_PARALLEL_METHODS}")
    if config.cp == 1 and config.cp_method is not None:
        raise ValueError(f"cp_method={config.cp_method!r} needs cp > 1; cp is 1")
    if config.cp > 1 and config.tp > 1 and config.dp_replicate > 1 and config.resolved_strategy == "no_shard":
        # Their gradients are summed over dp_replicate x cp, which is no dim of the mesh that tp splits.
        raise ValueError(
            f"whole parameters on dp_replicate={config.dp_replicate} x cp={config.cp} do not compose with "
            f"tp={config.tp}; use data_parallel='fsdp2' with strategy='hybrid_shard', or tp=1"
        )


def _check_pipeline(config: "ParallelConfig") -> None:
    if config.pp == 1:
        if config.stages is not None:
            raise ValueError(f"stages={config.stages} are those of a pipeline (pp > 1); pp is 1")
        return
    if config.stages is not None and any(blocks < 1 for blocks in config.stages):
        raise ValueError(f"stages={config.stages}: each has a block or more")
    if config.reduce_gradients == "every_micro_batch":
        raise ValueError(
            f"with pp={config.pp} gradients are summed over data-parallel ranks once a step; use "
            "reduce_gradients='last', or leave it out"
        )
    if config.sharding.reshard_group is not None or config.sharding.keep_last_unit:
        raise ValueError(
            f"with pp={config.pp} every unit stays gathered until the step ends, so {config.sharding} has no meaning; "
            "leave reshard_group and keep_last_unit out"
        )
    # What a file says is read where the layout meets a model: a config may come from a machine that had the file.
    if config.schedule != FROM_FILE:
        check_split_backward(config)


def check_backend(config: "ParallelConfig") -> None:
    """Holds the fields against what the backend can do.

    Raises:
        ValueError: If one of them has no meaning for it or does not compose with it.
    """
    backend, traits = config.data_parallel, TRAITS[config.data_parallel]
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    split = {axis: getattr(config, axis) for axis in axes if getattr(config, axis) not in (1, -1)}
    if traits.one_process and split:
        raise ValueError(
            f"data_parallel={backend!r} is one process, but {split} ask for more; use data_parallel='fsdp2'"
        )
    refused = [axis for axis in split if axis in traits.refused_axes]
    if refused:
        raise ValueError(
            f"{backend} does not compose with {', '.join(f'{axis}={split[axis]}' for axis in refused)}; use "
            f"{traits.refused_axes[refused[0]]}"
        )
    if config.reduce_gradients == "every_micro_batch" and not traits.sums_each_micro_batch:
        raise ValueError(
            f"{backend} holds whole gradients and would sum again what it has summed before; use "
            "reduce_gradients='last', or leave it out"
        )
    for name, has_meaning in (("sharding", traits.shards), ("buckets", traits.has_buckets)):
        options = getattr(config, name)
        if not has_meaning and options != type(options)():
            users = "fsdp1 or fsdp2" if name == "sharding" else "ddp or zero1"
            raise ValueError(f"{options} has no meaning for {backend}; leave it out, or use {users}")
    by_block = [f"{axis}={split[axis]}" for axis in ("pp", "tp") if axis in split]
    if by_block and config.buckets != type(config.buckets)():
        raise ValueError(
            f"with {' x '.join(by_block)} {backend} sends a block's gradients at once, so "
            f"{config.buckets} has no meaning; leave buckets out"
        )
    _check_sharding(backend, traits, config.sharding)


def _check_sharding(backend: str, traits: Traits, sharding: "Sharding") -> None:
    default = type(sharding)()
    for name, instead in traits.refused_sharding.items():
        value = getattr(sharding, name)
        if value != getattr(default, name):
            raise ValueError(f"sharding.{name}={value} has no meaning for {backend}; leave it out, or use {instead}")
    for name in ("forward_prefetch", "backward_prefetch"):
        ahead, most = getattr(sharding, name), traits.most_prefetch
        if most is not None and ahead > most:
            raise ValueError(
                f"{backend} gathers at most {most} unit ahead, but sharding.{name}={ahead}; use {most}, or "
                "data_parallel='fsdp2'"
            )


def check_strategy(config: "ParallelConfig") -> None:
    """Holds the sharding strategy against backend and degrees.

    Raises:
        ValueError: If they contradict each other.
    """
    backend, shards, strategy = config.data_parallel, TRAITS[config.data_parallel].shards, config.resolved_strategy
    if not shards and config.strategy not in (None, "no_shard"):
        raise ValueError(
            f"{backend} does not shard parameters, so strategy={config.strategy!r} has no meaning; "
            "use data_parallel='fsdp2', or leave strategy out"
        )
    if strategy == "no_shard" and config.dp_shard > 1:
        raise ValueError(
            f"{backend} does not shard parameters here, so dp_shard={config.dp_shard} has no meaning; use another "
            f"strategy of fsdp2, or dp_replicate={config.dp_replicate * config.dp_shard} with dp_shard=1"
        )
    if strategy == "no_shard" and config.ep > 1:
        raise ValueError(
            f"ep={config.ep} gives each rank some of the experts, but strategy='no_shard' keeps every parameter whole; "
            "use 'full_shard' or 'shard_grad_op', or ep=1"
        )
    if config.is_hybrid and config.dp_replicate == 1:
        raise ValueError(
            f"strategy={strategy!r} shards within a group and replicates over groups, so it needs "
            "dp_replicate > 1; dp_replicate is 1: use 'full_shard' or 'shard_grad_op', or set dp_replicate"
        )
    if config.sharding.reshard_group and strategy not in ("full_shard", "hybrid_shard"):
        raise ValueError(
            f"reshard_group={config.sharding.reshard_group} says over how many ranks a unit is kept after forward, "
            f"but strategy={strategy!r} keeps it whole; use full_shard or hybrid_shard"
        )
    if shards and config.dp_replicate > 1 and not config.is_hybrid and strategy != "no_shard":
        raise ValueError(
            f"strategy={strategy!r} shards over all data-parallel ranks, but dp_replicate={config.dp_replicate}; use "
            "'hybrid_shard' or 'hybrid_shard_zero2', or dp_replicate=1"
        )
