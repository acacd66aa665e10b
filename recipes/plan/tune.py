"""Runs the best plans for a few steps on this machine and picks by measurement."""

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoint.ranks import Ranks
from parallel import Batch, build_mesh, materialize
from parallel.planner.ranking import Plan
from recipes.compare.job import run_job
from recipes.metrics import peak_bytes
from recipes.model import build_model
from recipes.optimizer import adamw_factory
from recipes.plan.recipe_file import plan_recipe
from recipes.recipe import Recipe

WARM_STEPS = 2
LIMIT_S = 300.0
MEANING = 2
"""Changes where what is remembered comes to mean something else, so that older files are measured anew."""


class Measured(NamedTuple):
    """A plan and what it took.

    Attributes:
        plan: The plan.
        step_s: Median time of a step; None: it failed.
        peak_bytes: Of the rank that holds most, beyond what its process held before.
        failure: Why it failed.
        remembered: Whether that was measured earlier.
    """

    plan: Plan
    step_s: float | None
    peak_bytes: int | None
    failure: str | None
    remembered: bool

    @property
    def tokens_per_s(self) -> float | None:
        """Measured tokens a second of each GPU."""
        request = self.plan.request
        tokens = request.global_batch * request.sequence_length / request.num_gpus
        return None if self.step_s is None else tokens / self.step_s


def tune(model: str, plans: Sequence[Plan], steps: int, file: Path) -> list[Measured]:
    """Measures plans, those that a file remembers excepted; the fastest first, those that failed last.

    A plan that fails is not remembered, and runs again when it is next asked for.

    Args:
        model: Name of the model.
        plans: What to run; each on as many ranks of this machine as it plans for.
        steps: Steps that are timed.
        file: What was measured before, to which is added.

    Raises:
        ValueError: If this machine has fewer GPUs than the plans ask for, or the file is damaged.
        OSError: If the file cannot be written.
    """
    _check_devices(plans)
    known = _read(file)
    found: list[Measured] = []
    for plan in plans:
        recipe = plan_recipe(model, plan)
        key = _key(recipe, plan)
        if key in known:
            found.append(Measured(plan, known[key]["step_s"], known[key]["peak_bytes"], None, True))
            continue
        outcome = run_job(measure_steps, recipe, steps, num_processes=plan.request.num_gpus, limit_s=LIMIT_S)
        if outcome.failure is not None:
            # Not remembered: a run that a loaded machine fails, as by time, may succeed another day.
            found.append(Measured(plan, None, None, outcome.failure, False))
            continue
        step_s, peak = outcome.value
        known[key] = {"step_s": step_s, "peak_bytes": peak}
        _write(file, known)
        found.append(Measured(plan, step_s, peak, None, False))
    return sorted(found, key=lambda each: each.step_s if each.step_s is not None else float("inf"))


def measure_steps(recipe: Recipe, steps: int) -> tuple[float, int]:
    """Times steps of a recipe on random tokens; every rank calls this.

    Args:
        recipe: With the layout to measure.
        steps: Steps that are timed.

    Returns:
        Median seconds of a step, and bytes of the rank that holds most, beyond what its process held before.

    Raises:
        ValueError: On every rank, if the recipe does not fit the ranks.
    """
    mesh, ranks = build_mesh(recipe.parallel), Ranks()
    trained = build_model(recipe, mesh)
    # On a CPU the process itself counts, of which no plan knows.
    before = peak_bytes(mesh.device)
    materialize(trained, seed=recipe.training.seed)
    optimizer = trained.build_optimizer(adamw_factory(recipe.optimizer.at_batch(recipe.training.global_batch)))
    generator = torch.Generator().manual_seed(mesh.coordinate("dp"))
    shape = (recipe.training.micro_batch, recipe.data.sequence_length + 1)
    micro_batches = [
        _batch(torch.randint(0, recipe.model.shape.vocab_size, shape, generator=generator))
        for _ in range(recipe.training.num_micro_batches(mesh.degree("dp")))
    ]
    times_s = []
    for _ in range(WARM_STEPS + steps):
        start_s = time.perf_counter()
        trained.forward_backward(micro_batches)
        trained.clip_gradients(recipe.training.max_gradient_norm)
        optimizer.step()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    mine = statistics.median(times_s[WARM_STEPS:]), peak_bytes(mesh.device) - before
    found = ranks.gather(mine)
    return max(each[0] for each in found), max(each[1] for each in found)


def _batch(tokens: Tensor) -> Batch:
    return Batch.from_tokens(tokens[:, :-1], labels=tokens[:, 1:])


def _check_devices(plans: Sequence[Plan]) -> None:
    devices = torch.cuda.device_count()
    if not plans or plans[0].request.gpu.device == "cpu":
        return
    asked = plans[0].request.num_gpus
    if asked > devices:
        raise ValueError(
            f"tuning runs plans on this machine, which has {devices} GPUs, but they are for {asked}; plan for as many, "
            "or use --gpu cpu"
        )


def _key(recipe: Recipe, plan: Plan) -> str:
    """What a measurement belongs to: all that the ranks run, and the machine on which they do."""
    values = recipe.to_json()
    what = {name: values[name] for name in ("model", "parallel", "training")}
    where = [platform.node(), plan.request.gpu.name, plan.request.num_gpus, torch.__version__]
    text = json.dumps([MEANING, what, recipe.data.sequence_length, where], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        complete = all({"step_s", "peak_bytes"} <= set(each) for each in known.values())
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{str(file)!r} holds no measurements ({error}); remove it") from error
    if not complete:
        raise ValueError(f"{str(file)!r} holds incomplete measurements; remove it")
    return {key: each for key, each in known.items() if each["step_s"] is not None}


def _write(file: Path, known: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(known, indent=1), encoding="utf-8")
    beside.replace(file)
