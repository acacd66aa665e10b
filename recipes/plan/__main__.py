"""The command `python -m recipes.plan MODEL`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from parallel.planner.candidate import Request
from parallel.planner.claim import as_markdown
from parallel.planner.claims import claims
from parallel.planner.explain import refusal
from parallel.planner.guide import walk
from parallel.planner.hardware import read_gpus
from parallel.planner.scaling import Curve, frontier, scale
from parallel.planner.search import Found, search
from recipes.command import parse
from recipes.messages import one_message
from recipes.plan.beside_ledger import beside_ledger
from recipes.plan.command import PlanCommand
from recipes.plan.models import find_shape
from recipes.plan.pictures import draw_frontier, draw_scaling
from recipes.plan.published import read_rows
from recipes.plan.recipe_file import write_recipe
from recipes.plan.report import as_json, show, show_curves, show_measured, show_walk
from recipes.plan.rows_report import show_rows
from recipes.plan.tune import Measured, tune

COMPARED = 2
"""Plans that are always looked for, and of which the ledger is asked too: the best and the one behind it."""
NOTHING_FITS = 3
"""Exit code where no layout fits; the message says what would."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: With a code other than 0, where something is wrong or nothing fits.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with one_message(debug="--debug" in words):
        command = parse(PlanCommand, words, "python -m recipes.plan")
        command.check()
        if command.claims:
            _show_claims(command)
        elif command.rows is not None:
            show_rows(read_rows(None if command.rows == "published" else command.rows), as_json=command.json)
        else:
            _plan(command)


def _show_claims(command: PlanCommand) -> None:
    found = claims(find_shape)
    if command.json:
        print(json.dumps([each._asdict() for each in found], indent=1))
    else:
        print(as_markdown(found), end="")


def _plan(command: PlanCommand) -> None:
    request = command.request()
    found = search(request, most=max(command.top, command.tune, COMPARED))
    if not found.plans:
        print(f"error: {refusal(request, found, read_gpus(command.gpu_table))}", file=sys.stderr)
        if command.explain:
            show_walk(walk(request))
        raise SystemExit(NOTHING_FITS)
    measured = _measure(command, found)
    chosen = next((each.plan for each in measured if each.step_s is not None), found.plans[0])
    if command.write is not None:
        write_recipe(command.write, command.model, chosen)
    curves = scale(found.plans[0]) if command.scaling is not None else ()
    beside = beside_ledger(command.model, found.plans[:COMPARED])
    if command.json:
        guide = walk(request) if command.explain else None
        shown = replace(found, plans=found.plans[: max(command.top, command.tune)])
        print(json.dumps(as_json(command.model, shown, guide, curves, measured, beside), indent=1))
    else:
        show(command.model, found, command.top, beside)
        if measured:
            show_measured(measured)
        if command.explain:
            show_walk(walk(request))
    _draw(command, request, curves)


def _measure(command: PlanCommand, found: Found) -> list[Measured]:
    if not command.tune:
        return []
    return tune(command.model, found.plans[: command.tune], command.tune_steps, Path(command.tune_file))


def _draw(command: PlanCommand, request: Request, curves: Sequence[Curve]) -> None:
    if command.frontier is not None:
        others = search(request, most=30).plans
        draw_frontier(command.model, frontier(request), others, command.frontier)
        print(f"wrote {command.frontier}", file=sys.stderr)
    if command.scaling is not None:
        if not command.json:
            show_curves(curves)
        draw_scaling(command.model, curves, command.scaling)
        print(f"wrote {command.scaling}", file=sys.stderr)


if __name__ == "__main__":
    main()
