"""Prints ledgers as tables, or as JSON can hold them."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from parallel.ledger.wire import ring_bytes
from recipes.ledger.dry import DryLedger
from recipes.ledger.forecast import Forecast
from recipes.ledger.measure import RankLedger
from recipes.ledger.rows import Line, lines
from recipes.ledger.traced import TracedStep
from recipes.metrics import format_bytes
from recipes.recipe import Recipe


def print_ranks(console: Console, recipe: Recipe, ledgers: Sequence[RankLedger]) -> None:
    """Prints the first rank's lines, and of the others those that differ in what was traced.

    Args:
        console: Where.
        recipe: What ran.
        ledgers: Of every rank.
    """
    shown: list[tuple[Line, ...]] = []
    for ledger in ledgers:
        own = lines(ledger.predicted, ledger.traced)
        if own in shown:
            continue
        shown.append(own)
        _print_table(console, f"{recipe.name}, {ledger.mesh}: rank {ledger.rank}", own)
        _print_peak(console, ledger.traced)
    first = ledgers[0]
    reserved = "" if first.reserved_bytes is None else f", reserved {format_bytes(first.reserved_bytes)}"
    console.print(f"apart from tensors: peak of the process {format_bytes(first.process_peak_bytes)}{reserved}")
    _print_rest(console, first.predicted, all(line.holds for own in shown for line in own))


def print_dry(console: Console, recipe: Recipe, ledger: DryLedger) -> None:
    """Prints one rank of a job that does not run.

    Args:
        console: Where.
        recipe: What would run.
        ledger: Of that rank.
    """
    built = ledger.built
    places = ", ".join(f"{view} {place}" for view, place in built.coordinates.items())
    console.print(f"{recipe.name}: rank {ledger.rank} of {ledger.world_size} ({places}); {built.mesh}")
    console.print(
        f"{len(built.shards)} parameters, of which it holds {format_bytes(built.parameter_bytes)}; "
        f"{ledger.num_micro_batches} micro-batches a step; {ledger.time_s:.1f} s",
        soft_wrap=True,
    )
    if ledger.traced is None:
        console.print(f"no step was traced: {ledger.why_not}; what follows is predicted")
        _print_table(console, "predicted", predicted_lines(ledger.predicted))
        _print_rest(console, ledger.predicted, True)
        return
    own = lines(ledger.predicted, ledger.traced)
    _print_table(console, "predicted in closed form, and traced without values", own)
    _print_peak(console, ledger.traced)
    _print_rest(console, ledger.predicted, all(line.holds for line in own))


def predicted_lines(predicted: Forecast) -> tuple[Line, ...]:
    """What was predicted, where nothing was traced.

    Args:
        predicted: The forecast.
    """
    from parallel.ledger.term import traffic

    rest, memory = predicted.states.rest, predicted.memory
    pairs = [("parameters", rest.parameters), ("optimizer state", rest.optimizer_state)]
    pairs += [] if memory is None else [("all tensors, peak of the step", memory.peak)]
    pairs += [(f"{kind} over {view}, {phase}", size) for (kind, view, phase), size in traffic(predicted.terms).items()]
    return tuple(Line(what=what, predicted=size, traced=size, promise=0.0) for what, size in pairs)


def ranks_json(recipe: Recipe, ledgers: Sequence[RankLedger]) -> dict[str, Any]:
    """All figures of a real step.

    Args:
        recipe: What ran.
        ledgers: Of every rank.
    """
    ranks = [
        {
            "rank": each.rank,
            "lines": _plain(lines(each.predicted, each.traced)),
            "at_peak": _at_peak(each.traced),
            "process_peak_bytes": each.process_peak_bytes,
            "reserved_bytes": each.reserved_bytes,
        }
        for each in ledgers
    ]
    return {"recipe": recipe.name, "mesh": ledgers[0].mesh, "ranks": ranks} | _common(ledgers[0].predicted)


def dry_json(recipe: Recipe, ledger: DryLedger) -> dict[str, Any]:
    """All figures of one rank of a job that does not run.

    Args:
        recipe: What would run.
        ledger: Of that rank.
    """
    traced = ledger.traced
    own = predicted_lines(ledger.predicted) if traced is None else lines(ledger.predicted, traced)
    return {
        "recipe": recipe.name,
        "mesh": ledger.built.mesh,
        "rank": ledger.rank,
        "world_size": ledger.world_size,
        "coordinates": dict(ledger.built.coordinates),
        "parameter_bytes": ledger.built.parameter_bytes,
        "shards": {fqn: list(shard.local_shape) for fqn, shard in ledger.built.shards.items()},
        "lines": _plain(own),
        "at_peak": None if traced is None else _at_peak(traced),
        "num_collectives": None if traced is None else len(traced.collectives),
        "why_not_traced": ledger.why_not,
        "time_s": ledger.time_s,
    } | _common(ledger.predicted)


def _common(predicted: Forecast) -> dict[str, Any]:
    return {
        "accountings": dict(predicted.accountings),
        "flops_per_token": dict(predicted.flops_per_token),
        "hardware_flops_per_token": dict(predicted.hardware_flops_per_token),
        "bounds": [{"term": each.term, "share": each.share, "reason": each.reason} for each in predicted.bounds],
        "ring_bytes": sum(
            ring_bytes(each.channel.kind, each.payload_bytes, each.channel.ranks) for each in predicted.terms
        ),
        "replicas": None if predicted.replicas is None else dataclasses.asdict(predicted.replicas),
        "textbook": [
            {"form": each.text, "bytes": each.num_bytes} for each in (*predicted.state_forms, predicted.traffic_form)
        ],
    }


def _at_peak(traced: TracedStep) -> dict[str, int]:
    held = traced.at_peak
    return {
        "parameters": held.parameters,
        "unsharded": held.unsharded,
        "gradients": held.gradients,
        "optimizer_state": held.optimizer_state,
        "activations_and_buffers": traced.activation_bytes_at_peak,
    }


def _plain(own: Iterable[Line]) -> list[dict[str, Any]]:
    return [
        {
            "what": each.what,
            "predicted": each.predicted,
            "traced": each.traced,
            "residual": each.residual,
            "promise": each.promise,
            "holds": each.holds,
        }
        for each in own
    ]


def _print_table(console: Console, title: str, own: Iterable[Line]) -> None:
    table = Table("", title=title, title_justify="left")
    for column in ("predicted", "traced", "residual", "off by", "promise"):
        table.add_column(column, justify="right")
    for each in own:
        predicted = "-" if each.predicted is None else f"{each.predicted:,}"
        residual = "-" if each.residual is None else f"{each.residual:,}"
        share = "-" if each.residual is None or not each.traced else f"{each.residual / each.traced:+.2%}"
        promise = "exact" if each.promise == 0 else f"{each.promise:.0%}"
        mark = "" if each.holds else " BROKEN"
        table.add_row(each.what, predicted, f"{each.traced:,}", residual, share, promise + mark)
    console.print(table)


def _print_peak(console: Console, traced: TracedStep) -> None:
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in _at_peak(traced).items())
    console.print(f"at the peak: {parts}", soft_wrap=True)


def _print_rest(console: Console, predicted: Forecast, holds: bool) -> None:
    for each in predicted.bounds:
        how = "is not predicted" if each.share is None else f"makes the peak exact to {each.share:.0%} only"
        console.print(f"{each.term}: {how}, as {each.reason}", soft_wrap=True)
    if (replicas := predicted.replicas) is not None:
        sent = ", ".join(f"{what} {format_bytes(size)}" for what, size in replicas.sent_bytes.items())
        console.print(
            f"on {replicas.num_devices} GPUs the first holds the states above, each other one a copy of parameters "
            f"({format_bytes(replicas.parameters)}) and its gradients ({format_bytes(replicas.gradients)}) within a "
            f"micro-batch; over links in a step: {sent}. Predicted from torch's code: no GPU has checked it",
            soft_wrap=True,
        )
    rest, forward, backward = predicted.state_forms
    console.print(
        f"textbooks: states {rest.text} at rest, {forward.text} after forward, {backward.text} after backward; traffic "
        f"{predicted.traffic_form.text}",
        soft_wrap=True,
    )
    both = ", ".join(f"{name} {format_bytes(int(size))}" for name, size in predicted.accountings.items())
    console.print(f"model states by accounting, units in flight left out: {both}", soft_wrap=True)
    hardware = predicted.hardware_flops_per_token
    flops = ", ".join(f"{name} {count:.3e} ({hardware[name]:.3e})" for name, count in predicted.flops_per_token.items())
    console.print(f"FLOPs a token (with what is computed again): {flops}", soft_wrap=True)
    console.print("every prediction holds" if holds else "a prediction does not hold: see BROKEN")
