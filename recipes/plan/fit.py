"""Fits the planner's constants on published results, all of them or those of some sources."""

import statistics
from collections.abc import Sequence

from parallel.planner.constants import CONSTANTS, FITTED, Constants
from recipes.plan.published import Errors, Row, errors

UNFITTED = CONSTANTS._replace(matmul_share=0.6, tflops_per_w=1.0, eager_passes=4.0, link_share=0.8, reserved_share=0.12)
"""Where a fit without some rows starts: not from what was fitted with them."""
STEPS = (1.2, 1.08, 1.03, 1.01)
"""Factors by which a fit changes constants, one after the other."""


def loss(rows: Sequence[Row], constants: Constants) -> float:
    """Mean absolute relative error of speed and of memory, where both are published.

    Args:
        rows: Published results.
        constants: With which they are predicted.
    """
    found = [errors(row, constants) for row in rows]
    speed = statistics.fmean(abs(each.speed_error) for each in found)
    memory = [abs(each.memory_error) for each in found if each.memory_error is not None]
    return speed + (statistics.fmean(memory) if memory else 0.0)


def fit(rows: Sequence[Row], start: Constants = UNFITTED) -> Constants:
    """Changes one fitted constant at a time while that helps, by ever smaller factors.

    Args:
        rows: Published results.
        start: Where it starts.
    """
    best, least = start, loss(rows, start)
    for factor in STEPS:
        improved = True
        while improved:
            improved = False
            for name in FITTED:
                for times in (factor, 1 / factor):
                    value = getattr(best, name) * times
                    if name.endswith("_share") and name != "reserved_share" and value > 0.95:
                        continue
                    tried = best._replace(**{name: value})
                    if (error := loss(rows, tried)) < least - 1e-6:
                        best, least, improved = tried, error, True
    return best


def without_source(rows: Sequence[Row], source: str) -> list[Errors]:
    """Errors of a source's rows with constants that were fitted on the others.

    Args:
        rows: Published results.
        source: The source to leave out.
    """
    constants = fit([row for row in rows if row.source != source])
    return [errors(row, constants) for row in rows if row.source == source]
