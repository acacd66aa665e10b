"""Holds a ParallelConfig against a world size, a model's shape and a batch, before anything is built."""

import math
from dataclasses import replace

from parallel.activation_checkpoint import check_policy
from parallel.config import ParallelConfig
from parallel.plan import ModelShape
from parallel.schedules import check_micro_batches, check_stages
from parallel.traits import TRAITS


def resolve(config: ParallelConfig, world_size: int) -> ParallelConfig:
    """Fills in `dp_shard=-1` and holds the product of degrees against the world.

    Args:
        config: The layout asked for.
        world_size: Ranks of the job.

    Returns:
        The same layout with every degree positive.

    Raises:
        ValueError: If the degrees do not multiply to the world size.
    """
    others = config.pp * config.dp_replicate * config.cp * config.tp
    degrees = f"pp={config.pp} x dp_replicate={config.dp_replicate} x cp={config.cp} x tp={config.tp}"
    if TRAITS[config.data_parallel].one_process:
        if world_size != 1:
            raise ValueError(f"data_parallel={config.data_parallel!r} is one process; the world has {world_size} ranks")
        return replace(config, dp_shard=1)
    if config.dp_shard == -1:
        if world_size % others:
            raise ValueError(
                f"dp_shard=-1 takes the ranks that are left, but {world_size} ranks are not a multiple of "
                f"{degrees} = {others}; legal world sizes here: multiples of {others}"
            )
        left = world_size // others
        if config.resolved_strategy == "no_shard":
            return replace(config, dp_replicate=config.dp_replicate * left, dp_shard=1)
        return replace(config, dp_shard=left)
    product = others * config.dp_shard
    if product != world_size:
        raise ValueError(
            f"the degrees {degrees} x dp_shard={config.dp_shard} multiply to {product}, but the world has "
            f"{world_size} ranks; start {product} ranks or change a degree (dp_shard=-1 takes what is left)"
        )
    return config


def check_layout(config: ParallelConfig, shape: ModelShape, *, num_micro_batches: int | None = None) -> None:
    """Holds a resolved layout against a model.

    Args:
        config: Layout with every degree positive, as `resolve` returns it.
        shape: The model's counts and widths.
        num_micro_batches: Micro-batches of a step, where known.

    Raises:
        ValueError: If the model cannot be split this way; the message lists the legal degrees.
    """
    for name in ("num_heads", "num_kv_heads", "feed_forward_width"):
        _check_divides("tp", config.tp, name, getattr(shape, name), shape)
    _check_vocabulary(config, shape)
    _check_reshard_group(config)
    _check_experts(config, shape)
    if config.pp > 1:
        check_stages(config, shape)
        if num_micro_batches is not None:
            check_micro_batches(config, num_micro_batches)
    check_policy(config.activation_checkpoint_policy)
    if config.cp_method == "ulysses":
        split = config.tp * config.cp
        if split > shape.num_heads or shape.num_heads % split:
            raise ValueError(
                f"ulysses splits heads: tp x cp = {config.tp} x {config.cp} = {split} must divide the model's "
                f"{shape.num_heads} heads"
            )


def check_sequence_length(config: ParallelConfig, sequence_length: int, shape: ModelShape) -> None:
    """Holds the length of a batch's sequences against the axes that split them, and against the model.

    Args:
        config: The layout.
        sequence_length: Tokens of one row of a batch.
        shape: The model's counts and widths.

    Raises:
        ValueError: If the length does not divide; gloo would abort the process on uneven parts. Or if the model's
            positions do not go so far.
    """
    if shape.max_sequence_length is not None and sequence_length > shape.max_sequence_length:
        raise ValueError(
            f"sequence_length={sequence_length} is more than the model's "
            f"max_sequence_length={shape.max_sequence_length}; shorten it or raise max_sequence_length"
        )
    if config.tp > 1 and config.sequence_parallel and sequence_length % config.tp:
        raise ValueError(
            f"sequence_parallel splits the sequence over tp={config.tp} ranks, which must divide "
            f"sequence_length={sequence_length}; nearest legal: {_neighbours(sequence_length, config.tp)}, "
            "or sequence_parallel=False"
        )
    parts = sequence_multiple(config)
    if sequence_length % parts:
        within = f" and sequence_parallel over tp={config.tp}" if config.tp > 1 and config.sequence_parallel else ""
        raise ValueError(
            f"cp={config.cp} with cp_method={config.cp_method!r}{within} splits the sequence into {parts} parts, which "
            f"must divide sequence_length={sequence_length}; nearest legal: {_neighbours(sequence_length, parts)}"
        )


def sequence_multiple(config: ParallelConfig) -> int:
    """What the length of a sequence must be a multiple of, so that its parts are as long on every rank.

    Args:
        config: The layout.
    """
    pieces = 2 if config.cp_method == "ring" else 1
    return config.cp * math.lcm(pieces, config.tp if config.sequence_parallel else 1)


def _check_divides(axis: str, degree: int, name: str, count: int, shape: ModelShape) -> None:
    if count % degree:
        legal = [
            n
            for n in range(1, shape.num_kv_heads + 1)
            if not (shape.num_heads % n or shape.num_kv_heads % n or shape.feed_forward_width % n)
        ]
        raise ValueError(f"{axis}={degree} must divide {name}={count}; legal here: {legal}")


def _check_vocabulary(config: ParallelConfig, shape: ModelShape) -> None:
    """A rank that held no entry could look nothing up; uneven parts are legal."""

    def leaves_none_empty(tp: int) -> bool:
        return -(-shape.vocab_size // tp) * (tp - 1) < shape.vocab_size

    if not leaves_none_empty(config.tp):
        legal = [tp for tp in range(1, config.tp) if leaves_none_empty(tp)]
        raise ValueError(
            f"tp={config.tp} leaves a rank without any of vocab_size={shape.vocab_size}; legal here: {legal}"
        )


def _check_reshard_group(config: ParallelConfig) -> None:
    group, ranks = config.sharding.reshard_group, config.dp_shard * config.cp
    if group is not None and (group >= ranks or ranks % group):
        legal = [n for n in range(2, ranks) if ranks % n == 0]
        raise ValueError(
            f"reshard_group={group} must divide dp_shard x cp = {config.dp_shard} x {config.cp} = {ranks} ranks and be "
            f"less; legal here: {legal or 'none'}"
        )
    if group is not None and config.tp > 1:
        # Torch 2.13 makes the smaller groups by calls that all ranks of the job must make alike, but each rank asks for
        # those of its own tp coordinate: they would wait for each other for ever.
        raise ValueError(
            f"reshard_group={group} does not compose with tp={config.tp}: torch could not build its groups; leave "
            "reshard_group out, or use tp=1"
        )


def _check_experts(config: ParallelConfig, shape: ModelShape) -> None:
    for name in ("expert_width", "shared_expert_width"):
        width = getattr(shape, name)
        if shape.num_experts and width and width % config.tp:
            raise ValueError(
                f"tp={config.tp} splits each expert and must divide {name}={width}; legal here: "
                f"{[n for n in range(1, config.tp) if width % n == 0]}"
            )
    if config.ep == 1:
        return
    if shape.num_experts == 0:
        raise ValueError(f"ep={config.ep} splits experts, but the model is dense; use ep=1")
    if shape.num_experts % config.ep:
        legal = [n for n in range(1, shape.num_experts + 1) if shape.num_experts % n == 0]
        raise ValueError(f"ep={config.ep} must divide num_experts={shape.num_experts}; legal here: {legal}")
    ranks = config.dp_shard * config.cp
    if ranks % config.ep:
        raise ValueError(
            f"ep={config.ep} is carved out of dp_shard x cp = {config.dp_shard} x {config.cp} = {ranks} ranks and "
            f"must divide them; legal here: {[n for n in range(1, ranks + 1) if ranks % n == 0]}"
        )


def _neighbours(length: int, parts: int) -> str:
    below = length // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)
