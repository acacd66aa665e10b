"""One layout of a comparison, and the figures that follow from what its ranks measured."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallel.collective_ops import Kind
from parallel.ledger.live import LiveBytes
from parallel.ledger.states import Moments
from parallel.ledger.term import Traffic, counted_traffic, traffic
from parallel.ledger.wire import ring_bytes
from recipes.compare.job import Outcome
from recipes.compare.layouts import Layout
from recipes.compare.measure import LayoutReport

MOMENTS = tuple(each.name for each in dataclasses.fields(Moments))
HELD = tuple(each.name for each in dataclasses.fields(LiveBytes))


@dataclass(frozen=True, kw_only=True)
class TrafficRow:
    """What rank 0 sent of one kind along one view.

    Attributes:
        kind: Kind of the collectives.
        view: View of the mesh.
        num_ranks: Ranks of its group.
        num_calls: Collectives.
        counted_bytes: Payload that was counted.
        predicted_bytes: Payload that was predicted.
        wire_bytes: What a ring puts on the wire for it.
    """

    kind: Kind
    view: str
    num_ranks: int
    num_calls: int
    counted_bytes: int
    predicted_bytes: int
    wire_bytes: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout.

    Attributes:
        layout: What ran.
        outcome: How it ended.
    """

    layout: Layout
    outcome: Outcome

    @property
    def report(self) -> LayoutReport | None:
        """What was measured; None if the layout failed."""
        report: LayoutReport | None = self.outcome.value
        return report

    def loss_difference(self, reference: "Row") -> float | None:
        """Largest difference of a step's loss to another row's; None where one of them has failed."""
        if self.report is None or reference.report is None:
            return None
        pairs = zip(self.report.losses, reference.report.losses, strict=True)
        return max(abs(mine - theirs) for mine, theirs in pairs)

    def residual_bytes(self) -> int:
        """Bytes in which predictions were wrong: of traffic and of memory, summed over all ranks."""
        if self.report is None:
            return 0
        total = 0
        for rank in self.report.ranks:
            total += _distance(traffic(rank.predicted), counted_traffic(rank.timeline.collectives))
            for moment in MOMENTS:
                measured, predicted = getattr(rank.states, moment), getattr(rank.predicted_states, moment)
                total += sum(abs(getattr(measured, each) - getattr(predicted, each)) for each in HELD)
        return total

    def traffic(self) -> list[TrafficRow]:
        """What rank 0 sent, by kind and view."""
        if self.report is None:
            return []
        rank = self.report.ranks[0]
        predicted: dict[tuple[Kind, str], int] = defaultdict(int)
        ranks_of: dict[tuple[Kind, str], int] = {}
        for term in rank.predicted:
            where = term.channel.kind, term.channel.view
            predicted[where] += term.payload_bytes
            ranks_of[where] = term.channel.ranks
        counted: dict[tuple[Kind, str], list[int]] = defaultdict(list)
        for each in rank.timeline.collectives:
            counted[each.kind, each.view].append(each.payload_bytes)
            ranks_of[each.kind, each.view] = len(each.ranks)
        return [
            TrafficRow(
                kind=kind,
                view=view,
                num_ranks=num_ranks,
                num_calls=len(counted[kind, view]),
                counted_bytes=sum(counted[kind, view]),
                predicted_bytes=predicted[kind, view],
                wire_bytes=ring_bytes(kind, sum(counted[kind, view]), num_ranks),
            )
            for (kind, view), num_ranks in sorted(ranks_of.items())
        ]

    def wire_bytes(self) -> float:
        """What rank 0 sent around rings in all."""
        return sum(each.wire_bytes for each in self.traffic())

    def to_json(self, reference: "Row") -> dict[str, Any]:
        """All figures as JSON can hold them."""
        values = {
            "layout": self.layout.name,
            "num_ranks": self.layout.num_ranks,
            "config": self.layout.config,
            "failure": self.outcome.failure,
            "warnings": self.outcome.warnings,
            "time_s": self.outcome.time_s,
            "loss_difference": self.loss_difference(reference),
            "residual_bytes": self.residual_bytes(),
            "traffic": self.traffic(),
            "measured": self.report,
        }
        plain: dict[str, Any] = _plain(values)
        return plain


def step_time_s(report: LayoutReport) -> float:
    """Time of a step: that of the slowest rank.

    Args:
        report: What a layout measured.
    """
    return max(rank.step_time_s for rank in report.ranks)


def held_bytes(held: LiveBytes) -> int:
    """Parameters, gathered ones, gradients and optimizer state together.

    Args:
        held: What a rank holds.
    """
    return sum(getattr(held, each) for each in HELD)


def _distance(one: Traffic, other: Traffic) -> int:
    return sum(abs(one[where] - other[where]) for where in one.keys() | other.keys())


def _plain(value: Any) -> Any:
    """Dataclasses, dtypes and tuples as JSON knows them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
