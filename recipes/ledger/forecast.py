"""Predicts what a recipe holds, sends and computes on one rank, without building it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from parallel import Mesh
from parallel.layout import resolve
from parallel.ledger.block_sizes import BatchShape
from parallel.ledger.exactness import Bound, bounds_of
from parallel.ledger.flops import FlopConvention, recomputed_flops_per_token, training_flops_per_token
from parallel.ledger.memory import MemoryForecast, predict_memory, routing_bounds
from parallel.ledger.optimizer_memory import kernels_of
from parallel.ledger.padding import elements
from parallel.ledger.parts import ModelParts, model_parts, num_shards
from parallel.ledger.replicas_of_one_process import ReplicaForecast, predict_replicas
from parallel.ledger.states import Moments, predict_states
from parallel.ledger.stretches import kept_results
from parallel.ledger.term import Term
from parallel.ledger.textbook import Form, state_forms, traffic_form
from parallel.ledger.traffic import StepShape, predict_traffic
from parallel.planner.accounting import Accounting, state_bytes
from parallel.traits import TRAITS
from recipes.model import model_and_plan
from recipes.recipe import Recipe

VIEWS = ("pp", "fsdp", "loss", "cp", "tp")
"""Views of the mesh along which ranks differ in what they hold or send."""

CONVENTIONS: tuple[FlopConvention, ...] = ("full_attention", "all_parameters", "causal")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one rank is to hold, send and compute.

    Attributes:
        states: Parameters, gathered ones, gradients and optimizer state at three moments.
        memory: All tensors, activations and temporaries included; None where `bounds` says why not.
        terms: What it sends in a step.
        bounds: What is not exact, how far off it may be, and why.
        traffic_form: What textbooks say of its traffic.
        state_forms: What they say of states at the three moments.
        accountings: Model states of the textbooks' two accountings, in bytes: `classic` in float16 with a float32 copy,
            `stored` in float32, both without units in flight.
        flops_per_token: Of the model, by convention.
        hardware_flops_per_token: With what backward computes again, by convention.
        replicas: What further GPUs of the process hold and get; None: there are none.
    """

    states: Moments
    memory: MemoryForecast | None
    terms: tuple[Term, ...]
    bounds: tuple[Bound, ...]
    traffic_form: Form
    state_forms: tuple[Form, Form, Form]
    accountings: Mapping[str, float]
    flops_per_token: Mapping[str, int]
    hardware_flops_per_token: Mapping[str, int]
    replicas: ReplicaForecast | None = None


def forecast(
    recipe: Recipe,
    world_size: int,
    coordinates: Mapping[str, int],
    num_micro_batches: int,
    optimizer: str = "adamw",
    expert_rows: int | None = None,
    num_devices: int = 1,
) -> Forecast:
    """What one rank is to do in a step.

    Args:
        recipe: With its layout.
        world_size: Ranks of the job.
        coordinates: Place of the rank along each of `VIEWS`.
        num_micro_batches: Micro-batches of a step.
        optimizer: One of `OPTIMIZERS`; recipes train with AdamW.
        expert_rows: Rows of a micro-batch that come to the experts of this rank in each layer. None: an even load.
        num_devices: GPUs of the process, over which `dp` splits micro-batches.

    Raises:
        ValueError: If the ledger does not know the optimizer, or torch has no such kernels of it.
    """
    config = resolve(recipe.parallel, world_size)
    parts = _parts_of(recipe, world_size, coordinates["pp"])
    batch = BatchShape(
        num_micro_batches=num_micro_batches,
        micro_batch=recipe.training.micro_batch,
        sequence_length=recipe.data.sequence_length,
        has_documents=not recipe.data.attend_across_documents,
        optimizer=optimizer,
        optimizer_kernels=kernels_of(optimizer, recipe.optimizer.implementation),
        decays=recipe.optimizer.weight_decay > 0,
        expert_rows=expert_rows,
    )
    step = StepShape(
        num_micro_batches=num_micro_batches,
        num_tokens=num_micro_batches * batch.micro_batch * batch.sequence_length,
        clips=True,
        num_rows=num_micro_batches * batch.micro_batch,
    )
    shape, length = recipe.model.shape, batch.sequence_length
    flops: dict[str, int] = {each: training_flops_per_token(shape, length, each) for each in CONVENTIONS}
    kept, every = kept_results(config), config.activation_checkpoint_every
    again = {each: recomputed_flops_per_token(shape, length, each, kept, every=every) for each in CONVENTIONS}
    bounds = bounds_of(parts, num_devices)
    if not any(bound.is_unknown for bound in bounds):
        bounds += routing_bounds(parts, batch, coordinates)
    return Forecast(
        states=predict_states(parts, coordinates, optimizer),
        memory=None if any(bound.is_unknown for bound in bounds) else predict_memory(parts, batch, coordinates),
        terms=predict_traffic(parts, step, coordinates["tp"], coordinates["fsdp"]),
        bounds=bounds,
        traffic_form=traffic_form(parts),
        state_forms=state_forms(parts),
        accountings=_accountings(parts),
        flops_per_token=flops,
        hardware_flops_per_token={each: flops[each] + again[each] for each in CONVENTIONS},
        replicas=predict_replicas(parts, batch, num_devices),
    )


@lru_cache(maxsize=16)
def _parts_of(recipe: Recipe, world_size: int, pp_rank: int) -> ModelParts:
    model, plan = model_and_plan(recipe)
    return model_parts(model, resolve(recipe.parallel, world_size), plan, pp_rank)


def _accountings(parts: ModelParts) -> dict[str, float]:
    """Both accountings of the rank's part of the model, padding left out."""
    config = parts.config
    zero1 = TRAITS[config.data_parallel].splits_optimizer_rows
    strategy: str = "zero1" if zero1 else config.resolved_strategy
    strategy = {"hybrid_shard": "full_shard", "hybrid_shard_zero2": "shard_grad_op"}.get(strategy, strategy)
    ranks = config.dp_replicate * config.cp if zero1 else num_shards(config)
    size = elements(parts.parameters, config, 0)
    frozen = 1 - elements([each for each in parts.parameters if each.trainable], config, 0) / size
    return {each: state_bytes(each, strategy, size, ranks, frozen=frozen) for each in get_args(Accounting)}


def coordinates_of(mesh: Mesh) -> dict[str, int]:
    """Place of this rank along each of `VIEWS`.

    Args:
        mesh: The mesh.
    """
    return {view: mesh.coordinate(view) for view in VIEWS}
