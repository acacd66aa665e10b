"""Predicts what a rank holds of a training state at three moments of a step, from the layout alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from parallel.config import ParallelConfig
from parallel.ledger.live import LiveBytes
from parallel.ledger.parts import ModelParts, ParameterSpec, is_unit_based, padded, part
from parallel.traits import TRAITS

ADAM_MOMENTS = 2
ADAM_STEP_BYTES = 4
"""AdamW counts the steps of each parameter in a float32."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Bytes that one rank holds, activations excluded.

    Attributes:
        rest: Between steps, gradients freed.
        after_forward: At the end of forward.
        after_backward: At the end of the last backward.
    """

    rest: LiveBytes
    after_forward: LiveBytes
    after_backward: LiveBytes


def predict_states(parts: ModelParts, coordinates: Mapping[str, int]) -> Moments:
    """What one rank holds of parameters, gradients and AdamW's state.

    Args:
        parts: The model in its layout.
        coordinates: Place of the rank along `fsdp`, `dp_replicate` and `tp`, from 0.
    """
    held = sum(_stored(each, parts.config, coordinates) for each in parts.parameters)
    gradients = sum(_stored(each, parts.config, coordinates) for each in parts.parameters if each.trainable)
    state = sum(_adam(each, parts.config, coordinates) for each in parts.parameters if each.trainable)
    gathered = _gathered(parts, coordinates)
    return Moments(
        rest=LiveBytes(parameters=held, unsharded=0, gradients=0, optimizer_state=state),
        after_forward=LiveBytes(parameters=held, unsharded=gathered, gradients=0, optimizer_state=state),
        after_backward=LiveBytes(parameters=held, unsharded=0, gradients=gradients, optimizer_state=state),
    )


def _stored(parameter: ParameterSpec, config: ParallelConfig, coordinates: Mapping[str, int]) -> int:
    """Bytes of a rank's shard, filled up to the largest one."""
    local = parameter.split(config.tp, coordinates["tp"])
    return padded(local, _shards(config)) // _shards(config) * parameter.dtype.itemsize


def _adam(parameter: ParameterSpec, config: ParallelConfig, coordinates: Mapping[str, int]) -> int:
    """Bytes of AdamW's state for the rows that a rank updates, without padding."""
    local = parameter.split(config.tp, coordinates["tp"])
    ranks, rank = _shards(config), coordinates["fsdp"]
    if TRAITS[config.data_parallel].splits_optimizer_rows:
        ranks, rank = config.dp_replicate, coordinates["dp_replicate"]
    rows = part(local[0], ranks, rank)
    return ADAM_MOMENTS * rows * prod(local[1:]) * parameter.dtype.itemsize + ADAM_STEP_BYTES


def _gathered(parts: ModelParts, coordinates: Mapping[str, int]) -> int:
    """Bytes of the units that are gathered at the end of forward, in the dtype in which they are computed with."""
    config = parts.config
    if not is_unit_based(config):
        return 0
    total = 0
    for unit in parts.units:
        # Resharding to a group leaves each of its ranks a part of what it gathers again.
        group = config.sharding.reshard_group if unit.gathered_again else None
        if not unit.kept and group is None:
            continue
        for parameter in unit.parameters:
            local = parameter.split(config.tp, coordinates["tp"])
            dtype = config.precision.compute_dtype or parameter.dtype
            # `fully_shard` makes a copy even where it has one rank and nothing to cast.
            total += padded(local, _shards(config)) // (group or 1) * dtype.itemsize
    return total


def _shards(config: ParallelConfig) -> int:
    """Ranks that share one copy of the parameters."""
    return config.dp_shard * config.cp
