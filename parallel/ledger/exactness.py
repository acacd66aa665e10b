"""Names what the ledger cannot predict exactly, with a bound and the reason."""

from dataclasses import dataclass

from parallel.ledger.block_sizes import runs_on_copies
from parallel.ledger.parts import ModelParts, num_shards
from parallel.schedules import traits_of
from parallel.traits import TRAITS

PROMISE = 0.03
"""Largest error of a predicted peak, as a share of what is traced, where nothing is listed."""


_SUMMED = ("o_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A term that is not exact.

    Attributes:
        term: What is meant.
        share: How far off the peak may be, as a share of what is traced. None: it is not predicted.
        reason: Why.
        in_trace: Whether a traced step may be that far off too, in which experts have an even load.
    """

    term: str
    share: float | None
    reason: str

    in_trace: bool = True

    @property
    def is_unknown(self) -> bool:
        """Whether there is no prediction of the peak."""
        return self.share is None


def bounds_of(parts: ModelParts) -> tuple[Bound, ...]:
    """What is not exact for a layout; nothing is wrong with model states and traffic.

    Args:
        parts: The rank's part of the model.
    """
    config, traits = parts.config, TRAITS[parts.config.data_parallel]
    has_experts = parts.whole.shape.num_experts > 0
    # What balances experts has no gradient in any case.
    is_frozen = not all(each.trainable for each in parts.parameters if not each.fqn.endswith(".selection_bias"))
    first = [block.fqn for block in parts.whole.first]
    cases = (
        (first != ["embed"], "a model of another make", None, "the closed form follows the ops of our own decoders"),
        (
            has_experts and config.ep > 1,
            "units of experts",
            0.15,
            "they are taken as gathered with their block, though each is gathered by itself",
        ),
        (
            has_experts and config.cp_method == "ulysses",
            "experts of split sequences",
            0.05,
            "the stream that heads and tokens are exchanged for stays a little longer before them",
        ),
        (
            has_experts and config.pp > 1 and traits_of(config).splits_backward,
            "experts where backward is split",
            0.25,
            "the gradients of their weights are taken as computed on the way to their input",
        ),
        (
            traits.flattens and is_frozen,
            "frozen parameters in flattened units",
            0.30,
            "torch makes gradients, and keeps inputs, for a whole unit where any of its parameters is trained",
        ),
        (
            runs_on_copies(parts) and not traits.flattens and config.activation_checkpointing != "none",
            "copies that blocks make themselves",
            0.15,
            "they are taken as made of the whole model at once, though blocks that are computed again free their own",
        ),
        (
            config.tp > 1 and any(f".{name}.adapter." in each.fqn for each in parts.parameters for name in _SUMMED),
            "adapters of maps whose output ranks sum",
            0.10,
            "where their own sums over ranks are kept is not followed",
        ),
        (
            config.compile,
            "compiled blocks",
            0.30,
            "the compiler decides which results it keeps; what blocks hold uncompiled was up to 24 % more and 22 % "
            "less in what was measured",
        ),
        (
            config.pp > 1 and traits_of(config).splits_backward and is_frozen,
            "frozen parameters where backward is split",
            None,
            "which walks torch then takes through the graph is not followed",
        ),
        (
            traits.flattens and num_shards(config) > 1 and config.sharding.units == "model",
            "a flattened unit of the whole model",
            0.10,
            "parts of it lie in it while gradients are joined, which is followed for units of a block",
        ),
        (
            traits.flattens and bool(parts.whole.tied) and config.precision.compute != "stored",
            "a tied embedding in flattened units in the compute dtype",
            0.05,
            "when its gathered copy goes is not followed",
        ),
        (traits.gathers_centrally, "replicas of one process", None, "their threads interleave as they happen to"),
        (
            config.sharding.units == "size",
            "units within blocks",
            0.10,
            "they are taken as gathered with their block, though each is gathered by itself",
        ),
        (
            config.cp_method == "ring" and config.activation_checkpointing == "selective",
            "what a ring keeps for backward",
            0.05,
            "the parts that its later steps compute again, and join, are not followed one by one",
        ),
    )
    return tuple(Bound(term=term, share=share, reason=reason) for applies, term, share, reason in cases if applies)


def promised_share(bounds: tuple[Bound, ...]) -> float:
    """How far off the peak of a traced step may be.

    Args:
        bounds: What is not exact.
    """
    return max([PROMISE, *(bound.share for bound in bounds if bound.share is not None and bound.in_trace)])
