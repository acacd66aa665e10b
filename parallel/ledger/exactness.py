"""Names what the ledger cannot predict exactly, with a bound and the reason."""

from collections.abc import Callable
from dataclasses import dataclass

from parallel.ledger.parts import ModelParts, num_shards
from parallel.schedules import traits_of
from parallel.traits import TRAITS

PROMISE = 0.03
"""Largest error of a predicted peak, as a share of what is traced, where nothing is listed."""


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


class _Facts:
    """What decides which terms of a layout are not exact."""

    def __init__(self, parts: ModelParts, num_devices: int) -> None:
        self.num_devices = num_devices
        self.parts, self.config, self.traits = parts, parts.config, TRAITS[parts.config.data_parallel]
        self.has_experts = parts.whole.shape.num_experts > 0
        # What balances experts has no gradient in any case.
        own = (each for each in parts.parameters if not each.fqn.endswith(".selection_bias"))
        self.is_frozen = not all(each.trainable for each in own)
        self.splits_backward = self.config.pp > 1 and traits_of(self.config).splits_backward
        self.is_cut_flat = self.traits.flattens and num_shards(self.config) > 1

    def has_summed_adapters(self) -> bool:
        """Whether there are adapters beside maps whose output ranks of `tp` sum."""
        names = [f".{name}.adapter." for name in ("o_proj", "down_proj")]
        return self.config.tp > 1 and any(name in each.fqn for each in self.parts.parameters for name in names)


_TERMS: tuple[tuple[Callable[[_Facts], bool], Bound], ...] = (
    (
        lambda its: [each.fqn for each in its.parts.whole.first] != ["embed"],
        Bound(
            term="a model of another make",
            share=None,
            reason="the closed form follows the ops of our own decoders",
        ),
    ),
    (
        lambda its: its.has_experts and its.config.ep > 1,
        Bound(
            term="units of experts",
            share=0.15,
            reason="they are taken as gathered with their block, though each is gathered by itself",
        ),
    ),
    (
        lambda its: its.has_experts and its.config.cp_method == "ulysses",
        Bound(
            term="experts of split sequences",
            share=0.05,
            reason="the stream that heads and tokens are exchanged for stays a little longer before them",
        ),
    ),
    (
        lambda its: its.has_experts and its.splits_backward,
        Bound(
            term="experts where backward is split",
            share=0.25,
            reason="the gradients of their weights are taken as computed on the way to their input",
        ),
    ),
    (
        lambda its: its.has_experts and its.splits_backward and its.is_frozen,
        Bound(
            term="frozen parameters beside experts where backward is split",
            share=None,
            reason="what of the experts' graph stays between both parts of backward is not followed",
        ),
    ),
    (
        lambda its: its.has_summed_adapters(),
        Bound(
            term="adapters of maps whose output ranks sum",
            share=0.10,
            reason="where their own sums over ranks are kept is not followed",
        ),
    ),
    (
        lambda its: its.config.compile,
        Bound(
            term="compiled blocks",
            share=0.30,
            reason="the compiler decides which results it keeps; what blocks hold uncompiled was up to 24 % more and "
            "22 % less in what was measured",
        ),
    ),
    (
        lambda its: its.is_cut_flat and its.config.sharding.units == "model",
        Bound(
            term="a flattened unit of the whole model",
            share=0.10,
            reason="parts of it lie in it while gradients are joined, which is followed for units of a block",
        ),
    ),
    (
        lambda its: its.traits.flattens and bool(its.parts.whole.tied) and its.config.precision.compute != "stored",
        Bound(
            term="a tied embedding in flattened units in the compute dtype",
            share=0.05,
            reason="when its gathered copy goes is not followed",
        ),
    ),
    (
        lambda its: its.traits.gathers_centrally and its.num_devices > 1,
        Bound(
            term="replicas of one process",
            share=None,
            reason="their threads interleave as they happen to, and no step without GPUs can check what they hold; "
            "states of the first GPU, copies on the others and traffic follow from torch's code",
        ),
    ),
    (
        lambda its: its.config.sharding.units == "size",
        Bound(
            term="units within blocks",
            share=0.10,
            reason="they are taken as gathered with their block, though each is gathered by itself",
        ),
    ),
    (
        lambda its: its.config.cp_method == "ring" and its.config.activation_checkpointing == "selective",
        Bound(
            term="what a ring keeps for backward",
            share=0.05,
            reason="the parts that its later steps compute again, and join, are not followed one by one",
        ),
    ),
)


def bounds_of(parts: ModelParts, num_devices: int = 1) -> tuple[Bound, ...]:
    """What is not exact for a layout; nothing is wrong with model states and traffic.

    Args:
        parts: The rank's part of the model.
        num_devices: GPUs of the rank.
    """
    facts = _Facts(parts, num_devices)
    return tuple(bound for applies, bound in _TERMS if applies(facts))


def promised_share(bounds: tuple[Bound, ...]) -> float:
    """How far off the peak of a traced step may be.

    Args:
        bounds: What is not exact.
    """
    return max([PROMISE, *(bound.share for bound in bounds if bound.share is not None and bound.in_trace)])
