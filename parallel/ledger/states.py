"""Predicts what a rank holds of a training state at three moments of a step, from the layout alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from parallel.config import ParallelConfig
from parallel.ledger.live import LiveBytes
from parallel.ledger.lookup import kinds_of
from parallel.ledger.optimizer_memory import NUMBER_BYTES, OPTIMIZERS, OptimizerMemory, optimizer_memory
from parallel.ledger.padding import flat_ranges, splits_columns, unit_elements
from parallel.ledger.parts import ModelParts, ParameterSpec, UnitSpec, is_unit_based, num_shards, part
from parallel.traits import TRAITS

ADAM_MOMENTS = OPTIMIZERS["adamw"].tensors


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


def predict_states(parts: ModelParts, coordinates: Mapping[str, int], optimizer: str = "adamw") -> Moments:
    """What one rank holds of parameters, gradients and the optimizer's state.

    Args:
        parts: The model in its layout.
        coordinates: Place of the rank along `fsdp`, `loss` and `tp`, from 0.
        optimizer: One of `OPTIMIZERS`.

    Raises:
        ValueError: If the optimizer is none of them.
    """
    memory = optimizer_memory(optimizer)
    copies = _copied(parts)
    kinds = tuple((unit, 1) for unit in parts.units) if copies else kinds_of(parts)
    updated = [(count, [each for each in unit.parameters if each not in copies]) for unit, count in kinds]
    # Gradients of a unit lie in one piece, which is there as long as one of them is.
    with_gradients = [(count, unit.parameters) for (unit, count), (_, own) in zip(kinds, updated, strict=True) if own]
    held = sum(count * _stored(unit.parameters, parts.config, coordinates) for unit, count in kinds_of(parts))
    gradients = sum(
        count * _stored(_with_gradients(own, parts.config, coordinates), parts.config, coordinates)
        for count, own in with_gradients
    )
    state = sum(count * _kept_by(memory, own, parts.config, coordinates) for count, own in updated)
    gathered = _gathered(parts, coordinates)
    return Moments(
        rest=LiveBytes(parameters=held, unsharded=0, gradients=0, optimizer_state=state),
        after_forward=LiveBytes(parameters=held, unsharded=gathered, gradients=0, optimizer_state=state),
        after_backward=LiveBytes(parameters=held, unsharded=0, gradients=gradients, optimizer_state=state),
    )


def flat_gradients(parts: ModelParts, coordinates: Mapping[str, int]) -> int:
    """Bytes of the gradients of flattened units, which each rank holds if any parameter of the unit is trained.

    Args:
        parts: The model in its layout.
        coordinates: As in `predict_states`.
    """
    return sum(
        count * _stored(unit.parameters, parts.config, coordinates)
        for unit, count in kinds_of(parts)
        if any(each.trainable for each in unit.parameters)
    )


def dropped_gradients(parts: ModelParts, coordinates: Mapping[str, int]) -> int:
    """Bytes of the gradients for which `drops_gradient` holds.

    Args:
        parts: The model in its layout.
        coordinates: As in `predict_states`.
    """
    return sum(
        count * _stored(unit.parameters, parts.config, coordinates)
        for unit, count in kinds_of(parts)
        if drops_gradient(unit, parts.config, coordinates)
    )


def drops_gradient(unit: UnitSpec, config: ParallelConfig, coordinates: Mapping[str, int]) -> bool:
    """Whether torch lets go of a flattened unit's gradient on this rank, which holds nothing of it that is trained.

    It does so when the next micro-batch goes back, but for units that stay gathered until then.

    Args:
        unit: The unit.
        config: The layout with every degree resolved.
        coordinates: As in `predict_states`.
    """
    if unit.kept or not TRAITS[config.data_parallel].flattens:
        return False
    trains = any(each.trainable for each in unit.parameters)
    return trains and not _with_gradients(unit.parameters, config, coordinates)


def _copied(parts: ModelParts) -> list[ParameterSpec]:
    """Tied parameters of a last stage whose rank has the first one too: copies, which no optimizer knows."""
    own = {each.fqn: each for each in parts.parameters}
    return [own[copy] for original, *copies in parts.whole.tied if original in own for copy in copies if copy in own]


def _with_gradients(
    parameters: Sequence[ParameterSpec], config: ParallelConfig, coordinates: Mapping[str, int]
) -> Sequence[ParameterSpec]:
    """The parameters for which a rank has gradients: of a flattened unit all, if it holds any that is trained."""
    if not TRAITS[config.data_parallel].flattens:
        return [each for each in parameters if each.trainable]
    own = _in_own_range(parameters, config, coordinates)
    return parameters if any(each.trainable and count for each, count in zip(parameters, own, strict=True)) else ()


def _stored(parameters: Sequence[ParameterSpec], config: ParallelConfig, coordinates: Mapping[str, int]) -> int:
    """Bytes of a rank's shard of a unit, filled up to the largest one."""
    if not parameters:
        return 0
    shards = num_shards(config) // parameters[0].ep
    return unit_elements(parameters, config, coordinates["tp"]) // shards * parameters[0].dtype.itemsize


def _kept_by(
    memory: OptimizerMemory,
    parameters: Sequence[ParameterSpec],
    config: ParallelConfig,
    coordinates: Mapping[str, int],
) -> int:
    """Bytes of an optimizer's state for what a rank updates of a unit, without padding."""
    if TRAITS[config.data_parallel].flattens:
        counts = _in_own_range(parameters, config, coordinates)
    else:
        counts = [_in_own_rows(each, config, coordinates) for each in parameters]
    return sum(
        memory.tensors * count * each.dtype.itemsize + memory.numbers * NUMBER_BYTES
        for each, count in zip(parameters, counts, strict=True)
        if each.trainable
    )


def _in_own_rows(parameter: ParameterSpec, config: ParallelConfig, coordinates: Mapping[str, int]) -> int:
    local = parameter.split(config.tp, coordinates["tp"])
    # Neighbours along fsdp share the experts.
    ranks, rank = num_shards(config) // parameter.ep, coordinates["fsdp"] // parameter.ep
    if splits_columns(parameter, config, coordinates["tp"]):
        return prod(local) // ranks
    if TRAITS[config.data_parallel].splits_optimizer_rows:
        ranks, rank = config.dp_replicate * config.cp, coordinates["loss"]
    return part(local[0], ranks, rank) * prod(local[1:])


def _in_own_range(
    parameters: Sequence[ParameterSpec], config: ParallelConfig, coordinates: Mapping[str, int]
) -> list[int]:
    """Elements of each parameter that lie in the range of a flattened unit which a rank holds."""
    size = unit_elements(parameters, config, coordinates["tp"]) // num_shards(config)
    start, stop = size * coordinates["fsdp"], size * (coordinates["fsdp"] + 1)
    ranges = flat_ranges(parameters, config, coordinates["tp"])
    return [max(0, min(each.stop, stop) - max(each.start, start)) for each in ranges]


def _gathered(parts: ModelParts, coordinates: Mapping[str, int]) -> int:
    """Bytes of the units that are gathered at the end of forward, in the dtype in which they are computed with."""
    config = parts.config
    # `fully_shard` makes a copy even where it has one rank and nothing to cast; flattened units make none.
    if not is_unit_based(config) or (TRAITS[config.data_parallel].flattens and num_shards(config) == 1):
        return 0
    total = 0
    for unit, count in kinds_of(parts):
        # Resharding to a group leaves each of its ranks a part of what it gathers again.
        regroups = unit.gathered_again and not any(each.ep > 1 for each in unit.parameters)
        group = config.sharding.reshard_group if regroups else None
        if unit.parameters and (unit.kept or group is not None):
            dtype = config.precision.compute_dtype or unit.parameters[0].dtype
            sent = unit_elements(unit.parameters, config, coordinates["tp"])
            total += count * (sent // (group or 1)) * dtype.itemsize
    return total
