"""Shows what the planner predicts from counts alone beside what the ledger says, which knows each parameter."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.table import Table

from parallel.planner.exact import Figures, of_ledger, planned
from parallel.planner.ranking import Plan
from recipes.metrics import format_bytes
from recipes.model import model_and_plan
from recipes.plan.models import find_config
from recipes.plan.recipe_file import plan_recipe

USES = {"dp": "parameters and gradients", "tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp"}
"""What bytes are sent for, in words."""


class Beside(NamedTuple):
    """What both say of one plan.

    Attributes:
        planner: Of the counts of the model.
        ledger: Of its parameters.
    """

    planner: Figures
    ledger: Figures


def beside_ledger(model: str, plans: Sequence[Plan]) -> tuple[Beside, ...]:
    """What both say of each plan; nothing for models that are a shape alone, or partly frozen by a share.

    Args:
        model: Name of the model.
        plans: Its plans.
    """
    if find_config(model) is None or any(plan.request.frozen for plan in plans):
        return ()
    found = []
    for plan in plans:
        module, declared = model_and_plan(plan_recipe(model, plan))
        exact = of_ledger(module, declared, plan.candidate, plan.request.sequence_length)
        found.append(Beside(planned(plan.request, plan.candidate), exact))
    return tuple(found)


def rows(each: Beside) -> Iterator[tuple[str, float, float]]:
    """What is compared, and the bytes of planner and ledger; what neither sends is left out.

    Args:
        each: What both say of a plan.
    """
    for name, ours, exact in zip(each.planner.states._fields, each.planner.states, each.ledger.states, strict=True):
        yield f"{name.replace('_', ' ')} held", ours, exact
    for use, words in USES.items():
        if each.planner.sent[use] or each.ledger.sent[use]:
            yield f"sent for {words}", each.planner.sent[use], each.ledger.sent[use]


def table(found: Sequence[Beside]) -> Table:
    """A table of the best plan and those behind it.

    Args:
        found: One for each plan.
    """
    made = Table(box=None, pad_edge=False, title_justify="left")
    made.title = "a step of the rank that holds most: planner beside ledger, which fills up uneven shards too"
    for name in ("plan", "what"):
        made.add_column(name)
    for name in ("planner", "ledger", "off by"):
        made.add_column(name, justify="right", no_wrap=True)
    for number, each in enumerate(found, start=1):
        for what, ours, exact in rows(each):
            off = f"{ours / exact - 1:+.2%}" if exact else "-"
            made.add_row(str(number), what, format_bytes(round(ours)), format_bytes(round(exact)), off)
    return made
