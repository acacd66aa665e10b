"""One optimizer step of a run, and what is to be said of it."""

import math
import time
import warnings
from typing import cast

from checkpoint import TrainState
from parallel import Trained
from recipes.data import DataStream
from recipes.metrics import StepMetrics, Utilization, peak_bytes
from recipes.recipe import Recipe
from recipes.schedule import Schedule


def take_step(recipe: Recipe, state: TrainState, utilization: Utilization | None) -> StepMetrics:
    """Trains on the next global batch; every rank calls this together.

    Args:
        recipe: What is trained.
        state: Its `stateful` are a `Schedule` and a `DataStream`, as `schedule` and `data`.
        utilization: What MFU is computed from; None: it is not.
    """
    start_s = time.perf_counter()
    trained, stream = cast(Trained, state.trained), cast(DataStream, state.stateful["data"])
    schedule = cast(Schedule, state.stateful["schedule"])
    optimizer, epoch = schedule.optimizer, stream.epoch
    # The last step of an epoch has fewer.
    num_samples = min(recipe.training.global_batch, stream.state_dict()["num_samples"] - stream.position)
    result = trained.forward_backward(stream.next_step())
    norm, skipped = float("nan"), result.skipped
    if not skipped:
        norm = trained.clip_gradients(recipe.training.max_gradient_norm).item()
        # Such gradients would turn every parameter into NaN, and soon every checkpoint that is kept.
        skipped = not math.isfinite(norm)
        if skipped:
            warnings.warn("the gradient norm is not finite: such steps change nothing; lower the rate", stacklevel=2)
        else:
            optimizer.step()
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    schedule.step()
    state.step += 1
    state.num_tokens += result.num_valid_tokens
    step_time_s, scale = time.perf_counter() - start_s, trained.loss_scale
    return StepMetrics(
        step=state.step,
        total_steps=recipe.training.steps,
        epoch=epoch,
        loss=result.loss,
        gradient_norm=norm,
        learning_rates=rates,
        num_tokens=result.num_valid_tokens,
        tokens_seen=state.num_tokens,
        step_time_s=step_time_s,
        peak_bytes=peak_bytes(trained.mesh.device),
        mfu=None if utilization is None else utilization.of(num_samples * recipe.data.sequence_length, step_time_s),
        skipped=skipped,
        expert_load=result.expert_load,
        num_dropped=result.num_dropped,
        loss_scale=None if scale is None else scale.value,
        num_skipped=None if scale is None else scale.num_skipped,
    )
