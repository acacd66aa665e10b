"""Runs a few steps of a recipe on every rank and measures what they send, hold and take."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from checkpoint.ranks import Ranks
from parallel import build_mesh
from parallel.ledger.states import Moments, predict_states
from parallel.ledger.term import Term
from parallel.ledger.textbook import Form, state_forms, traffic_form
from parallel.ledger.timeline import Timeline
from recipes.compare.training import Run
from recipes.metrics import peak_bytes
from recipes.recipe import Recipe

WARM_STEPS = 4
"""Steps before any that is measured: DDP agrees on its buckets in them."""

MIN_STEPS = WARM_STEPS + 3
"""At least one step is timed; one measures memory, one records collectives."""

COUNTERS = Path("/proc/net/dev")


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank measured.

    Attributes:
        step_time_s: Median of the timed steps.
        peak_bytes: Peak memory of the process.
        predicted: What the recorded step was to send.
        timeline: What it did.
        states: What the rank held.
        predicted_states: What it was to hold.
    """

    step_time_s: float
    peak_bytes: int
    predicted: tuple[Term, ...]
    timeline: Timeline
    states: Moments
    predicted_states: Moments


@dataclass(frozen=True, kw_only=True)
class LayoutReport:
    """What all ranks of a layout measured.

    Attributes:
        mesh: The layout in a few words.
        losses: Loss of each step.
        num_tokens: Tokens of the global batch.
        loopback_bytes: Bytes that the system saw on its loopback in a step, of all ranks; None where it does not say.
        traffic_form: What textbooks say that a rank sends.
        state_forms: What they say that it holds at the three moments.
        num_parameters: Parameters of the model.
        ranks: By rank.
    """

    mesh: str
    losses: tuple[float, ...]
    num_tokens: int
    loopback_bytes: float | None
    traffic_form: Form
    state_forms: tuple[Form, Form, Form]
    num_parameters: int
    ranks: tuple[RankReport, ...]


def measure(recipe: Recipe, num_steps: int) -> LayoutReport:
    """Takes the first steps of a recipe; every rank calls this.

    Args:
        recipe: With the layout to measure.
        num_steps: Steps, at least `MIN_STEPS`.

    Raises:
        ValueError: On every rank, if the recipe does not fit the ranks or the data.
    """
    mesh, ranks = build_mesh(recipe.parallel), Ranks()
    run = Run(recipe, mesh, ranks)
    for _ in range(WARM_STEPS):
        run.step()
    times_s, loopback = [], []
    for _ in range(num_steps - WARM_STEPS - 2):
        before, start_s = _loopback_bytes(), time.perf_counter()
        run.step()
        times_s.append(time.perf_counter() - start_s)
        after = _loopback_bytes()
        if before is not None and after is not None:
            loopback.append(after - before)
    states = run.step_under_meter()
    timeline, predicted = run.recorded_step()
    coordinates = {view: mesh.coordinate(view) for view in ("fsdp", "loss", "tp")}
    mine = RankReport(
        step_time_s=statistics.median(times_s),
        peak_bytes=peak_bytes(mesh.device),
        predicted=predicted,
        timeline=timeline,
        states=states,
        predicted_states=predict_states(run.parts, coordinates),
    )
    return LayoutReport(
        mesh=mesh.describe(),
        losses=tuple(run.losses),
        num_tokens=recipe.training.global_batch * recipe.data.sequence_length,
        loopback_bytes=statistics.median(loopback) if loopback else None,
        traffic_form=traffic_form(run.parts),
        state_forms=state_forms(run.parts),
        num_parameters=recipe.model.num_parameters,
        ranks=tuple(ranks.gather(mine)),
    )


def _loopback_bytes() -> int | None:
    """Bytes that this system has sent over its loopback so far; None where it does not say."""
    if not COUNTERS.exists():
        return None
    for line in COUNTERS.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return None
