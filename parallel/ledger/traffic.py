"""Predicts the payload of every collective of a training step from the layout alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from parallel.gradients import SHARDING_VIEWS
from parallel.ledger.padding import flat_ranges, unit_elements
from parallel.ledger.parts import ModelParts, num_shards, part
from parallel.ledger.term import Channel, Term, channel
from parallel.ledger.traffic_of_context_parallel import context_parallel_terms, whole_row_terms
from parallel.ledger.traffic_of_expert_parallel import expert_parallel_terms
from parallel.ledger.traffic_of_parameters import parameter_terms
from parallel.ledger.traffic_of_pipeline import pipeline_terms
from parallel.ledger.traffic_of_tensor_parallel import tensor_parallel_terms
from parallel.mesh import AXES, VIEWS
from parallel.traits import TRAITS

INT32, INT64, FLOAT64 = 4, 8, 8


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What one rank computes in a step.

    Attributes:
        num_micro_batches: Its micro-batches.
        num_tokens: Tokens of all of them, ignored ones too; ranks that share sequences have the same ones.
        clips: Whether the gradient norm is measured.
        num_rows: Rows of its micro-batches, which layers that look at whole rows tell each other of under cp. None: not
            known, which will do for other models.
    """

    num_micro_batches: int
    num_tokens: int
    clips: bool
    num_rows: int | None = None


def predict_traffic(parts: ModelParts, step: StepShape, tp_rank: int = 0, fsdp_rank: int = 0) -> tuple[Term, ...]:
    """What one rank sends in a step: forward, backward, clipping and the optimizer.

    Terms add up to the byte to what `CollectiveCounter` counts, see `traffic` and `counted_traffic`. DDP's first
    two steps, which agree on the order of buckets, send more. What rows of experts send is exact for the ranks of `ep`
    together.

    Args:
        parts: The model in its layout.
        step: What a rank computes.
        tp_rank: Place of the rank along `tp`; where a vocabulary does not divide, the last ones hold less.
        fsdp_rank: Place of the rank along `fsdp`, which matters in the same way to what stages of a pipeline tie.
    """
    num_own_tokens = step.num_tokens // parts.config.cp
    return tuple(
        term
        for term in (
            *_agreements(parts),
            *_overflow(parts),
            *parameter_terms(parts, step.num_micro_batches, tp_rank),
            *tensor_parallel_terms(parts, step.num_micro_batches, num_own_tokens),
            *context_parallel_terms(parts, num_own_tokens),
            *whole_row_terms(parts, step.num_rows, num_own_tokens),
            *expert_parallel_terms(parts, step.num_micro_batches, num_own_tokens),
            *pipeline_terms(parts, step.num_micro_batches, num_own_tokens, fsdp_rank, tp_rank),
            *_balance(parts, fsdp_rank, tp_rank),
            *(_norm(parts) if step.clips else ()),
        )
        if term.channel.ranks > 1 and term.payload_bytes
    )


def _agreements(parts: ModelParts) -> Iterator[Term]:
    """What ranks tell each other around the model."""
    over = channel(parts.config, "all_reduce", "loss", "forward")
    # Valid tokens, refusals, micro-batches and their square.
    yield Term(name="token count", channel=over, payload_bytes=4 * INT64)
    yield Term(name="loss", channel=over, payload_bytes=FLOAT64)
    num_loads = sum(block.has_experts for block in parts.plan.blocks) * parts.plan.shape.num_experts
    yield Term(name="expert load", channel=over, payload_bytes=num_loads * INT64)
    # Least and most of a hash of the micro-batches: ranks that share matrices or sequences need the same ones.
    for view in ("cp", "tp", "pp"):
        peers = channel(parts.config, "all_reduce", view, "forward")
        yield Term(name="same batches", channel=peers, payload_bytes=2 * INT64)


def _overflow(parts: ModelParts) -> Iterator[Term]:
    """Whether a gradient of a float16 model is not finite, which all ranks of the job must know."""
    if parts.config.precision.compute != "float16":
        return
    axes = [axis for axis in AXES if getattr(parts.config, axis) > 1]
    spans = {
        view: [axis for axis in AXES if axis in own and getattr(parts.config, axis) > 1] for view, own in VIEWS.items()
    }
    view = next((view for view, own in spans.items() if own == axes), "world")
    ranks = prod(getattr(parts.config, axis) for axis in axes)
    over = Channel(kind="all_reduce", view=view, ranks=ranks, phase="forward")
    yield Term(name="overflow", channel=over, payload_bytes=INT32)


def _balance(parts: ModelParts, fsdp_rank: int, tp_rank: int) -> Iterator[Term]:
    """Flattened biases of experts, which no gradient moves, are exchanged into rows to be moved, and back."""
    config, ranks, num_experts = parts.config, num_shards(parts.config), parts.whole.shape.num_experts
    if not TRAITS[config.data_parallel].flattens or ranks == 1:
        return
    over = channel(config, "all_to_all", "fsdp", "forward")
    starts = tuple(f"{block.fqn}." for block in parts.plan.blocks if block.has_experts)
    for unit in parts.units:
        size = unit_elements(unit.parameters, config, tp_rank) // ranks
        places = flat_ranges(unit.parameters, config, tp_rank)
        for each, place in zip(unit.parameters, places, strict=True):
            if each.fqn.startswith(starts) and each.shape == (num_experts,) and not each.trainable:
                own = max(0, min(place.stop, size * (fsdp_rank + 1)) - max(place.start, size * fsdp_rank))
                count = own + part(num_experts, ranks, fsdp_rank)
                yield Term(name="balance of experts", channel=over, payload_bytes=count * each.dtype.itemsize)


def _norm(parts: ModelParts) -> Iterator[Term]:
    """A sum for each set of views that a parameter may be sharded along, sent over each view of the set."""
    for view in SHARDING_VIEWS:
        over = channel(parts.config, "all_reduce", view, "forward")
        yield Term(name="gradient norm", channel=over, payload_bytes=2 ** (len(SHARDING_VIEWS) - 1) * FLOAT64)
    stages = channel(parts.config, "all_reduce", "pp", "forward")
    yield Term(name="gradient norm", channel=stages, payload_bytes=FLOAT64)
