"""What compiled blocks hold at most lies within the bound that the ledger lists for them."""

import dataclasses
import functools
from typing import Any

import pytest

from parallel import Precision, build_mesh, materialize
from parallel.ledger.allocations import peak_allocated
from parallel.ledger.exactness import promised_share
from recipes.ledger.forecast import coordinates_of, forecast
from recipes.ledger.measure import measure
from recipes.ledger.traced import TracedRun
from recipes.recipe import Recipe
from tests.parallel.ledger.test_memory import recipe
from tests.ranks import run_ranks

BF16 = Precision(compute="bfloat16", reduce="float32")


def peaks(asked: Recipe) -> tuple[int, int, float]:
    """Most bytes of a step, predicted and counted, and how far off the former may be."""
    mesh = build_mesh(asked.parallel)
    num_micro_batches = asked.training.num_micro_batches(mesh.degree("dp"))
    predicted = forecast(asked, mesh.size, coordinates_of(mesh), num_micro_batches)
    run = TracedRun(asked, mesh, functools.partial(materialize, seed=0), num_micro_batches)
    for _ in range(2):
        run.step()
    run.rest()
    assert predicted.memory is not None
    # What is there between steps is predicted to the byte.
    counted = predicted.memory.rest + peak_allocated(run.step)
    return predicted.memory.peak, counted, promised_share(predicted.bounds)


LAYOUTS: dict[str, dict[str, Any]] = {
    "recomputed in bf16": {"activation_checkpointing": "full", "precision": BF16},
    "tp in bf16, selectively recomputed": {"activation_checkpointing": "selective", "tp": 2, "precision": BF16},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_peak_with_compiled_blocks_is_within_the_listed_bound(layout: str) -> None:
    asked = recipe(LAYOUTS[layout] | {"compile": True}, {})
    asked = dataclasses.replace(asked, training=dataclasses.replace(asked.training, global_batch=8))
    for predicted, counted, share in run_ranks(2, peaks, asked):
        assert share == 0.30
        assert predicted == pytest.approx(counted, abs=share * counted)


def test_a_real_step_of_compiled_blocks_is_refused_as_no_meter_follows_it() -> None:
    with pytest.raises(ValueError, match="compiled code does not allow; use --world-size"):
        measure(recipe({"compile": True}, {}))
