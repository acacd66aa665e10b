"""Predicts what parameters, gradients and optimizer state send: the data-parallel part of a step."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from parallel.config import ParallelConfig
from parallel.counter import Phase
from parallel.ledger.lookup import kinds_of
from parallel.ledger.padding import padded, unit_elements
from parallel.ledger.parts import ModelParts, ParameterSpec, UnitSpec, is_unit_based, num_reductions, num_shards
from parallel.ledger.schedule_order import actions_of, runs_listed
from parallel.ledger.spans import spans_of
from parallel.ledger.term import Channel, Term, channel, elements
from parallel.traits import TRAITS

INT32 = 4


def parameter_terms(parts: ModelParts, num_micro_batches: int, tp_rank: int) -> Iterator[Term]:
    """Terms of one step.

    Args:
        parts: The model in its layout.
        num_micro_batches: Micro-batches of a rank.
        tp_rank: Place of the rank along `tp`.
    """
    config, traits = parts.config, TRAITS[parts.config.data_parallel]
    if is_unit_based(config):
        times = _gathers_of_stages(parts, num_micro_batches) if config.pp > 1 else {}
        # Stages may be gathered more often than others, so that their units are not alike.
        for unit, count in ((unit, 1) for unit in parts.units) if times else kinds_of(parts):
            again = 1 if _stays(parts, unit, num_micro_batches) else num_micro_batches
            gathers = _repeated(_gathers(unit, config, tp_rank), times.get(unit, again))
            sums = _repeated(_reductions(unit, config, tp_rank), num_reductions(config, num_micro_batches))
            for term in (*gathers, *sums):
                yield replace(term, payload_bytes=count * term.payload_bytes)
    elif traits.has_buckets:
        yield from _buckets(parts)
        if traits.splits_optimizer_rows:
            yield from _updated_rows(parts)


def _stays(parts: ModelParts, unit: UnitSpec, num_micro_batches: int) -> bool:
    """Whether a unit stays gathered between micro-batches: FSDP1 frees what forward kept when it sums its gradient."""
    config = parts.config
    if not TRAITS[config.data_parallel].flattens or num_reductions(config, num_micro_batches) > 1:
        return False
    # The root is kept in forward because backward needs it at once, and freed after that like any other.
    frees = config.resolved_strategy in ("full_shard", "hybrid_shard")
    return unit.kept and not (frees and unit is parts.units[-1])


def _gathers_of_stages(parts: ModelParts, num_micro_batches: int) -> dict[UnitSpec, int]:
    """How often a rank gathers each unit of its stages, which stay for all micro-batches while they are few."""
    counts = {lap: 1 for lap, _ in enumerate(spans_of(parts))}
    if runs_listed(parts.config):
        actions = actions_of(parts.config, parts.pp_rank, num_micro_batches)
        counts = dict(Counter(action.lap for action in actions if action.kind == "gather"))
    return {unit: counts[lap] for lap, span in enumerate(spans_of(parts)) for unit in span.units}


def _gathers(unit: UnitSpec, config: ParallelConfig, tp_rank: int) -> Iterator[Term]:
    """A unit is gathered for its forward, and for its backward too where it was freed between them."""
    if config.resolved_strategy == "no_shard":
        return
    view = _view(unit.parameters)
    forward = channel(config, "all_gather", view, "forward")
    dtype = config.precision.compute_dtype
    yield from _together("parameters", forward, unit.parameters, config, tp_rank, dtype)
    if config.resolved_strategy not in ("full_shard", "hybrid_shard"):
        return
    backward = channel(config, "all_gather", view, "backward")
    if config.sharding.reshard_group and view == "fsdp":
        group = config.sharding.reshard_group
        # Neighbours along fsdp, which are no view of the mesh unless they share experts.
        backward = replace(backward, view="other", ranks=group)
        if group == config.ep:
            backward = channel(config, "all_gather", "ep", "backward")
    again = list(_together("parameters again", backward, unit.parameters, config, tp_rank, dtype))
    yield from again
    if not unit.gathered_again:
        saved = sum(term.payload_bytes for term in again)
        name = "parameters again: units still there" if unit.kept else "parameters again: units not needed"
        yield Term(name=name, channel=backward, payload_bytes=-saved)


def _reductions(unit: UnitSpec, config: ParallelConfig, tp_rank: int) -> Iterator[Term]:
    """Gradients are summed over the ranks that share a unit, and each rank's part over the replicas."""
    is_whole = config.resolved_strategy == "no_shard"
    # After its last micro-batch a stage sums by itself, which is no part of what autograd runs.
    phase: Phase = "forward" if config.pp > 1 else "backward"
    scatter = channel(config, "reduce_scatter", _view(unit.parameters), phase)
    replicas = channel(config, "all_reduce", "loss" if is_whole else "dp_replicate", phase)
    parameters = [each for each in unit.parameters if each.trainable]
    if parameters and TRAITS[config.data_parallel].flattens:
        parameters = list(unit.parameters)
    dtype = config.precision.reduce_dtype or config.precision.compute_dtype
    if not is_whole:
        yield from _together("gradients", scatter, parameters, config, tp_rank, dtype)
    for term in _together("gradients over replicas", replicas, parameters, config, tp_rank, dtype):
        yield replace(term, payload_bytes=term.payload_bytes // (num_shards(config) // parameters[0].ep))


def _view(parameters: Sequence[ParameterSpec]) -> str:
    """Who shards the parameters of a unit."""
    return "expert_fsdp" if parameters and parameters[0].ep > 1 else "fsdp"


def _together(
    name: str,
    where: Channel,
    parameters: Sequence[ParameterSpec],
    config: ParallelConfig,
    tp_rank: int,
    dtype: torch.dtype | None,
) -> Iterator[Term]:
    """The terms of parameters that travel in one collective, in their own dtype where none is given."""
    if not parameters:
        return
    stored = parameters[0].dtype
    count = sum(prod(each.split(config.tp, tp_rank)) for each in parameters)
    sent = unit_elements(parameters, config, tp_rank)
    yield from elements(name, where, count, sent=sent, stored=stored, dtype=dtype or stored)


def _buckets(parts: ModelParts) -> Iterator[Term]:
    """Each gradient travels once, in whichever bucket."""
    over = channel(parts.config, "all_reduce", "loss", "backward")
    trainable = [each for each in parts.parameters if each.trainable]
    for each in trainable:
        dtype, count = parts.config.precision.reduce_dtype or each.dtype, prod(each.shape)
        yield from elements("gradients", over, count, sent=count, stored=each.dtype, dtype=dtype)
    if parts.config.buckets.find_unused_parameters:
        yield Term(name="used parameters", channel=over, payload_bytes=len(trainable) * INT32)


def _updated_rows(parts: ModelParts) -> Iterator[Term]:
    """After the optimizer each rank sends its rows, as many as the rank with most."""
    over = channel(parts.config, "all_gather", "loss", "forward")
    for each in parts.parameters:
        if each.trainable:
            sent = padded(each.shape, over.ranks)
            yield from elements("updated rows", over, prod(each.shape), sent=sent, stored=each.dtype, dtype=each.dtype)


def _repeated(terms: Iterable[Term], times: int) -> Iterator[Term]:
    for term in terms:
        yield term
        if times > 1:
            yield Term(
                name="further micro-batches", channel=term.channel, payload_bytes=(times - 1) * term.payload_bytes
            )
