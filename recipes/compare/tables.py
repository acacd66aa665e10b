"""Turns rows of a comparison into tables of words, for the console and for the report."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.ledger.wire import central_gather_bytes
from parallel.traits import TRAITS
from recipes.compare.layouts import DEFAULT_RANKS
from recipes.compare.rows import MOMENTS, Row, held_bytes, step_time_s
from recipes.metrics import format_bytes


@dataclass(frozen=True, kw_only=True)
class Words:
    """A table.

    Attributes:
        title: What it shows.
        columns: Their names.
        rows: Their words.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summary(rows: Sequence[Row]) -> Words:
    """One line for each layout; the first row is the one process that losses are compared with.

    Args:
        rows: The comparison.
    """
    last = max((len(row.report.losses) for row in rows if row.report), default=0)
    columns = (
        "layout",
        f"loss {last}",
        "difference",
        "sends",
        "holds at rest",
        "after forward",
        "after backward",
        "residual",
        "ms a step",
        "tokens/s",
        "waits",
        "peak memory",
    )
    return Words(
        title="a rank of each layout: bytes sent around rings and held, and how far both are from what was predicted",
        columns=columns,
        rows=tuple(_summary_row(row, rows[0], len(columns)) for row in rows),
    )


def _summary_row(row: Row, reference: Row, num_columns: int) -> tuple[str, ...]:
    report = row.report
    if report is None:
        return (row.layout.name, "failed", *[""] * (num_columns - 2))
    difference = row.loss_difference(reference)
    rank = report.ranks[0]
    return (
        row.layout.name,
        f"{report.losses[-1]:.4f}",
        "-" if difference is None else f"{difference:.1e}",
        _kilobytes(row.wire_bytes()),
        *(_kilobytes(held_bytes(getattr(rank.states, moment))) for moment in MOMENTS),
        f"{row.residual_bytes()} B",
        f"{step_time_s(report) * 1e3:.0f}",
        f"{report.num_tokens / step_time_s(report):,.0f}",
        f"{rank.timeline.waiting_share:.0%}",
        format_bytes(max(each.peak_bytes for each in report.ranks)),
    )


def _kilobytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e3:,.1f} kB"


def notes(rows: Sequence[Row]) -> list[str]:
    """Why layouts failed, and what they warned of.

    Args:
        rows: The comparison.
    """
    said = [(row.layout.name, each) for row in rows for each in row.outcome.warnings]
    failed = [(row.layout.name, f"failed: {row.outcome.failure}") for row in rows if row.outcome.failure is not None]
    return [f"{name}: {each}" for name, each in [*failed, *said]]


def traffic_table(rows: Sequence[Row]) -> Words:
    """What rank 0 of each layout sent, by kind and view of the mesh.

    Args:
        rows: The comparison.
    """
    lines: list[tuple[str, ...]] = []
    for row in rows:
        for number, each in enumerate(row.traffic()):
            lines.append(
                (
                    "" if number else row.layout.name,
                    each.kind,
                    f"{each.view} ({each.num_ranks})",
                    str(each.num_calls),
                    f"{each.counted_bytes:,}",
                    f"{each.predicted_bytes:,}",
                    f"{each.counted_bytes - each.predicted_bytes:,}",
                    f"{each.wire_bytes:,.0f}",
                )
            )
    columns = ("layout", "kind", "view (ranks)", "calls", "payload counted", "predicted", "residual", "ring")
    return Words(title="traffic of rank 0 in one step, bytes", columns=columns, rows=tuple(lines))


def forms_table(rows: Sequence[Row]) -> Words:
    """What textbooks say that a rank sends, beside a ring's bytes and those of the system.

    Args:
        rows: The comparison.
    """
    lines: list[tuple[str, ...]] = []
    for row in rows:
        report = row.report
        if report is None:
            continue
        form, sent = report.traffic_form, row.wire_bytes()
        loopback = "-" if report.loopback_bytes is None else f"{report.loopback_bytes / len(report.ranks):,.0f}"
        lines.append((row.layout.name, form.text, f"{form.num_bytes:,.0f}", f"{sent:,.0f}", loopback))
        if TRAITS[row.layout.config.data_parallel].gathers_centrally:
            for ranks in DEFAULT_RANKS:
                size = central_gather_bytes(report.num_parameters * 4, ranks)
                lines.append((f"{row.layout.name} on {ranks} GPUs", "8P(N-1) at the first one", f"{size:,}", "-", "-"))
    columns = ("layout", "textbook", "gives", "ring, predicted and counted", "loopback of the system, a rank")
    return Words(title="traffic beside the closed forms, bytes a step", columns=columns, rows=tuple(lines))


def terms_table(row: Row) -> Words:
    """The terms of which the prediction for rank 0 consists.

    Args:
        row: One layout.
    """
    totals: dict[tuple[str, str, str, str], int] = {}
    for term in row.report.ranks[0].predicted if row.report else ():
        where = term.channel
        key = term.name, where.kind, f"{where.view} ({where.ranks})", where.phase
        totals[key] = totals.get(key, 0) + term.payload_bytes
    lines = tuple((*key, f"{payload:,}") for key, payload in totals.items())
    return Words(title=row.layout.name, columns=("term", "kind", "view (ranks)", "phase", "payload"), rows=lines)


def memory_table(rows: Sequence[Row]) -> Words:
    """What rank 0 of each layout held at three moments.

    Args:
        rows: The comparison.
    """
    lines: list[tuple[str, ...]] = []
    for row in rows:
        report = row.report
        if report is None:
            continue
        for number, (moment, form) in enumerate(zip(MOMENTS, report.state_forms, strict=True)):
            held, predicted = (
                getattr(states, moment) for states in (report.ranks[0].states, report.ranks[0].predicted_states)
            )
            lines.append(
                (
                    "" if number else row.layout.name,
                    moment.replace("_", " "),
                    f"{held.parameters:,}",
                    f"{held.unsharded:,}",
                    f"{held.gradients:,}",
                    f"{held.optimizer_state:,}",
                    f"{held_bytes(held):,}",
                    f"{held_bytes(held) - held_bytes(predicted):,}",
                    f"{form.text} = {form.num_bytes:,.0f}",
                )
            )
    columns = (
        "layout",
        "when",
        "parameters",
        "gathered",
        "gradients",
        "optimizer state",
        "in all",
        "less predicted",
        "textbook",
    )
    return Words(title="what rank 0 holds, bytes", columns=columns, rows=tuple(lines))
