"""Takes a recipe's step as one rank of a job of any size: built by the real code, computed without values."""

import time
from dataclasses import dataclass

from parallel import build_mesh
from parallel.layout import resolve
from recipes.dry_run import DryRun, dry_run, fake_world
from recipes.ledger.fake import check_fake, fake_step
from recipes.ledger.forecast import Forecast, coordinates_of, forecast
from recipes.ledger.traced import TracedStep
from recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class DryLedger:
    """One rank of a job that does not run.

    Attributes:
        rank: Its global rank.
        world_size: Ranks of the job.
        built: Its shards.
        predicted: What was predicted in closed form.
        traced: What its step held and sent; None where it cannot be taken without values.
        why_not: Why it cannot.
        num_micro_batches: Micro-batches of the step.
        time_s: Seconds that all of it took.
    """

    rank: int
    world_size: int
    built: DryRun
    predicted: Forecast
    traced: TracedStep | None
    why_not: str | None
    num_micro_batches: int
    time_s: float


def dry_ledger(recipe: Recipe, world_size: int, rank: int, optimizer: str = "adamw", num_devices: int = 1) -> DryLedger:
    """Builds a recipe as one rank of many and takes a step.

    Args:
        recipe: What to train and how to split it.
        world_size: Ranks of the job.
        rank: The rank to be.
        optimizer: One of `OPTIMIZERS`.
        num_devices: GPUs of the process, over which `dp` splits micro-batches.

    Raises:
        ValueError: If the recipe does not fit that many ranks, the rank is none of them, or the ledger does not know
            the optimizer.
    """
    start_s = time.monotonic()
    recipe.check_step(world_size)
    built = dry_run(recipe, world_size, rank)
    config = resolve(recipe.parallel, world_size)
    num_micro_batches = recipe.training.num_micro_batches(config.dp_replicate * config.dp_shard)
    with fake_world(world_size, rank):
        coordinates = coordinates_of(build_mesh(recipe.parallel, "cpu"))
    predicted = forecast(recipe, world_size, coordinates, num_micro_batches, optimizer, num_devices=num_devices)
    why_not = check_fake(recipe, num_devices)
    traced = None
    if why_not is None:
        traced, _ = fake_step(recipe, world_size, rank, num_micro_batches, look=coordinates_of, optimizer=optimizer)
    return DryLedger(
        rank=rank,
        world_size=world_size,
        built=built,
        predicted=predicted,
        traced=traced,
        why_not=why_not,
        num_micro_batches=num_micro_batches,
        time_s=time.monotonic() - start_s,
    )
