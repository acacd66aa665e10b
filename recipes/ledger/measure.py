"""Runs a recipe's step on every rank of a job, and keeps what each held and sent beside what was predicted."""

import functools
from dataclasses import dataclass

from checkpoint.ranks import Ranks
from parallel import build_mesh, materialize
from recipes.ledger.forecast import Forecast, coordinates_of, forecast
from recipes.ledger.traced import TracedRun, TracedStep
from recipes.metrics import peak_bytes
from recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class RankLedger:
    """One rank's step, predicted and traced.

    Attributes:
        rank: Its global rank.
        mesh: The layout in a few words.
        predicted: What was predicted.
        traced: What it held and sent.
        process_peak_bytes: Peak memory of the process, or of the GPU as its allocator counts.
        reserved_bytes: What the GPU's allocator has reserved at most; None on a CPU.
    """

    rank: int
    mesh: str
    predicted: Forecast
    traced: TracedStep
    process_peak_bytes: int
    reserved_bytes: int | None = None


def measure(recipe: Recipe, optimizer: str = "adamw") -> tuple[RankLedger, ...]:
    """Takes a few steps of a recipe on made-up tokens; every rank calls this.

    Args:
        recipe: With its layout.
        optimizer: One of `OPTIMIZERS`.

    Returns:
        The ledger of each rank, on every rank.

    Raises:
        ValueError: On every rank, if the recipe does not fit the ranks, the ledger does not know the optimizer, or
            blocks are compiled.
    """
    import torch

    if recipe.parallel.compile:
        raise ValueError(
            "the ledger follows a step tensor by tensor, which compiled code does not allow; use --world-size, which "
            "predicts and does not run it, or --parallel.no-compile"
        )
    mesh, ranks = build_mesh(recipe.parallel), Ranks()
    num_micro_batches = recipe.training.num_micro_batches(mesh.degree("dp"))
    fill = functools.partial(materialize, seed=recipe.training.seed)
    run = TracedRun(recipe, mesh, fill, num_micro_batches, optimizer=optimizer)
    traced = run.trace()
    on_gpu = mesh.device.type == "cuda"
    mine = RankLedger(
        rank=ranks.rank,
        mesh=mesh.describe(),
        predicted=forecast(
            recipe,
            mesh.size,
            coordinates_of(mesh),
            num_micro_batches,
            optimizer,
            num_devices=max(1, torch.cuda.device_count()),
        ),
        traced=traced,
        process_peak_bytes=peak_bytes(mesh.device),
        reserved_bytes=torch.cuda.max_memory_reserved(mesh.device) if on_gpu else None,
    )
    return tuple(ranks.gather(mine))
