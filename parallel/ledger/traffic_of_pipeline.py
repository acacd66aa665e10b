"""Predicts what `pp` sends: the residual stream between stages, and what stages tell each other around it."""

from collections.abc import Iterator
from itertools import pairwise
from math import prod

import torch

from parallel.collective_ops import Kind
from parallel.ledger.parts import ModelParts, num_shards, part
from parallel.ledger.term import Term, channel
from parallel.stages import cut

INT64 = FLOAT64 = 8


def pipeline_terms(
    parts: ModelParts, num_micro_batches: int, num_tokens: int, fsdp_rank: int, tp_rank: int
) -> Iterator[Term]:
    """Terms of one step, whatever the schedule: it decides when a micro-batch goes where, not how often.

    All of them count as forward, since torch's schedules send outside of what autograd runs.

    Args:
        parts: The rank's part of the model.
        num_micro_batches: Micro-batches of a step.
        num_tokens: Tokens of a rank's parts of all of them.
        fsdp_rank: Place of the rank along `fsdp`.
        tp_rank: Place of the rank along `tp`.
    """
    config = parts.config
    if config.pp == 1:
        return
    dtype = config.precision.compute_dtype or parts.parameters[0].dtype
    loss_itemsize = torch.promote_types(dtype, torch.float32).itemsize
    over = channel(config, "broadcast", "pp", "forward")
    yield Term(name="losses", channel=over, payload_bytes=num_micro_batches * loss_itemsize)
    yield from _stream(parts, num_micro_batches, num_tokens, dtype.itemsize, loss_itemsize)
    loads = sum(block.has_experts for block in parts.whole.blocks) * parts.whole.shape.num_experts
    yield Term(name="expert load", channel=channel(config, "all_reduce", "pp", "forward"), payload_bytes=loads * INT64)
    yield from _tied(parts, fsdp_rank, tp_rank)


def _stream(
    parts: ModelParts, num_micro_batches: int, num_tokens: int, itemsize: int, loss_itemsize: int
) -> Iterator[Term]:
    """Each border between stages of two ranks is crossed once forward, and once backward by a gradient."""
    config, stages = parts.config, cut(parts.whole, parts.config)
    split = config.tp if config.sequence_parallel else 1
    hidden = num_tokens // split * parts.whole.shape.width * itemsize
    so_far: set[str] = set()
    for stage, following in pairwise(stages):
        so_far |= set(stage.modules)
        # Beside the stream goes what blocks have added to a loss.
        adds = any(block.adds_loss for block in parts.whole.blocks if block.fqn in so_far)
        payload = hidden + adds * num_micro_batches * loss_itemsize
        if stage.rank == following.rank or parts.pp_rank not in (stage.rank, following.rank):
            continue
        ends: tuple[Kind, Kind] = ("send", "recv") if stage.rank == parts.pp_rank else ("recv", "send")
        for kind, name in zip(ends, ("residual stream", "gradients of the residual stream"), strict=True):
            yield Term(name=name, channel=channel(config, kind, "pp", "forward"), payload_bytes=payload)


def _tied(parts: ModelParts, fsdp_rank: int, tp_rank: int) -> Iterator[Term]:
    """Each of the two ranks that hold a tied parameter sends its part of the gradient to the other one."""
    config, stages = parts.config, cut(parts.whole, parts.config)
    first, last = stages[0].rank, stages[-1].rank
    if first == last or parts.pp_rank not in (first, last):
        return
    tied = {name for names in parts.whole.tied for name in names}
    for each in parts.parameters:
        if each.fqn in tied and each.trainable:
            rows, *columns = each.split(config.tp, tp_rank)
            payload = part(rows, num_shards(config), fsdp_rank) * prod(columns) * each.dtype.itemsize
            for kind in ("send", "recv"):
                where = channel(config, kind, "pp", "forward")
                yield Term(name="gradients of tied parameters", channel=where, payload_bytes=payload)
