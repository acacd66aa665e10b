"""A named part of the payload that a rank sends in a step."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from parallel.collective_ops import Kind
from parallel.config import ParallelConfig
from parallel.counter import Collective, Phase
from parallel.mesh import AXES, EXPERT_VIEWS, VIEWS

Traffic = Counter[tuple[Kind, str, Phase]]
"""Payload in bytes by kind, view of the mesh, and phase."""


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Where a term belongs.

    Attributes:
        kind: Kind of the collective.
        view: View of the mesh whose group it spans, by the name that a counter would give it.
        ranks: Ranks of the group.
        phase: In forward and around the model, or called by autograd in backward.
    """

    kind: Kind
    view: str
    ranks: int
    phase: Phase


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand of what a rank sends in a step.

    Attributes:
        name: What it is for.
        channel: How it travels.
        payload_bytes: Bytes of the larger side of its collectives; less than 0 for what a layout saves.
    """

    name: str
    channel: Channel
    payload_bytes: int


@lru_cache(maxsize=1024)
def channel(config: ParallelConfig, kind: Kind, view: str, phase: Phase) -> Channel:
    """The channel of a collective over a view.

    Args:
        config: The layout with every degree resolved.
        kind: Kind of the collective.
        view: Any view of the mesh.
        phase: When.
    """
    spans = _spans(config, view)
    twin = next(name for name in (*VIEWS, *EXPERT_VIEWS) if _spans(config, name) == spans)
    return Channel(kind=kind, view=twin, ranks=prod(size for _, size in spans), phase=phase)


def _spans(config: ParallelConfig, view: str) -> list[tuple[int, int]]:
    """How far apart neighbours in a view are, and how many: for each stretch of it that is even, outermost first."""
    stride, spans = 1, list[tuple[int, int]]()
    for axis in reversed(AXES):
        size = getattr(config, axis)
        if axis in VIEWS.get(view, VIEWS["fsdp"]):
            spans.insert(0, (stride, size))
        stride *= size
    if view in EXPERT_VIEWS:
        inner, ranks = spans[-1][0], prod(size for _, size in spans)
        spans = [(inner, config.ep)] if view == "ep" else [(inner * config.ep, ranks // config.ep)]
    even: list[tuple[int, int]] = []
    for stride, size in spans:
        if even and even[-1][0] == stride * size:
            even[-1] = (stride, even[-1][1] * size)
        elif size > 1:
            even.append((stride, size))
    return even


def elements(
    name: str, where: Channel, count: int, *, sent: int, stored: torch.dtype, dtype: torch.dtype
) -> Iterator[Term]:
    """The terms of some elements that are sent in another number and dtype than the model stores them in.

    Args:
        name: Of the term that textbooks know: all elements once, as stored.
        where: How they travel.
        count: Elements of the model.
        sent: Elements that are sent, padding included.
        stored: Type in which the model keeps them.
        dtype: Type in which they travel.
    """
    yield Term(name=name, channel=where, payload_bytes=count * stored.itemsize)
    if dtype.itemsize != stored.itemsize:
        change = count * (dtype.itemsize - stored.itemsize)
        yield Term(name=f"{name}: sent in {str(dtype).removeprefix('torch.')}", channel=where, payload_bytes=change)
    if sent != count:
        yield Term(name=f"{name}: padding", channel=where, payload_bytes=(sent - count) * dtype.itemsize)


def traffic(terms: Iterable[Term]) -> Traffic:
    """The sum of terms for each way to travel.

    Args:
        terms: What `predict_traffic` gave.
    """
    total: Traffic = Counter()
    for term in terms:
        if term.channel.ranks > 1:
            total[term.channel.kind, term.channel.view, term.channel.phase] += term.payload_bytes
    return Counter({where: payload for where, payload in total.items() if payload})


def counted_traffic(records: Iterable[Collective]) -> Traffic:
    """The same of what a step really sent.

    Args:
        records: What a `CollectiveCounter` recorded.
    """
    total: Traffic = Counter()
    for each in records:
        total[each.kind, each.view, each.phase] += each.payload_bytes
    return total
