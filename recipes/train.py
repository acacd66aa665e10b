"""The training loop and its command: `python -m recipes.train RECIPE [overrides]`."""

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from torch.optim import Optimizer

from checkpoint import TrainState, latest, load
from checkpoint.ranks import Ranks
from parallel import Batch, Mesh, Trained, build_mesh, materialize
from parallel.materialize import allocate
from recipes.command import parse_train
from recipes.data import DataStream, TextData, evaluation_batches, load_dataset
from recipes.folder_lock import enter_alone
from recipes.from_checkpoint import find_checkpoint, in_one_line, load_weights, refuse_other_model
from recipes.launch import run
from recipes.metrics import (
    EvaluationMetrics,
    MetricsSink,
    Reporter,
    StepMetrics,
    Utilization,
    find_utilization,
    open_sinks,
    peak_bytes,
)
from recipes.model import build_model
from recipes.optimizer import adamw_factory
from recipes.recipe import Recipe, changed_fields
from recipes.run_log import RunLog, TrainSummary
from recipes.schedule import Schedule
from recipes.table import recipe_table


def train(recipe: Recipe, changes: Sequence[str] | None = None) -> TrainSummary:
    """Trains a recipe, from its newest checkpoint or from the start; every rank of the job calls this.

    Args:
        recipe: What to train and how to split it.
        changes: Fields in which it differs from the recipe that it is named after, to be shown; None: not known.

    Returns:
        What the run did.

    Raises:
        ValueError: On every rank, if the recipe does not fit the ranks, the data or the checkpoint.
        OSError: On every rank, if something cannot be written.
    """
    mesh, ranks = build_mesh(recipe.parallel), Ranks()
    with ExitStack() as stack:
        ranks.on_coordinator(f"use {recipe.output.folder}", lambda: enter_alone(recipe.output.folder, stack))
        return _train(recipe, mesh, ranks, changes)


def _train(recipe: Recipe, mesh: Mesh, ranks: Ranks, changes: Sequence[str] | None) -> TrainSummary:
    """Trains a recipe in a folder that is its own."""
    training = recipe.training
    trained = build_model(recipe, mesh)
    found = ranks.on_coordinator(f"use {recipe.output.checkpoints}", lambda: _newest(recipe.output.checkpoints))
    origin = None if found is not None else _origin(ranks, training.init_from)
    text = ranks.together("read the text", lambda: load_dataset(recipe.data))
    _require_equal(ranks, recipe, text)
    stream = _stream(recipe, text, mesh)
    if found is None and origin is None:
        materialize(trained, seed=training.seed)
    else:
        allocate(trained)
    optimizer = trained.build_optimizer(adamw_factory(recipe.optimizer.at_batch(training.global_batch)))
    schedule = Schedule(optimizer, recipe.schedule, training.steps)
    state = TrainState(
        trained=trained,
        optimizer=optimizer,
        stateful={"schedule": schedule, "data": stream},
        recipe=recipe.to_json(),
    )
    load_s = _timed_load(found, origin, state, recipe)
    utilization = _utilization(recipe, mesh)

    with ExitStack() as stack:
        sinks = _open_sinks(recipe, ranks, None if found is None else state.step, stack)
        reporter = stack.enter_context(
            Reporter(
                total_steps=training.steps, rank=ranks.rank, done_steps=state.step, every_steps=recipe.output.log_every
            )
        )
        reporter.table(recipe_table(recipe, mesh, text, utilization, changes))
        reporter.message(_headline(state, found, origin, training.last_step))
        log = RunLog(reporter, sinks, state.step)
        evaluation = _evaluation(recipe, text, mesh)
        while state.step < training.last_step:
            log.step(_step(recipe, state, stream, schedule, utilization))
            if _is_due(state.step, training.evaluate_every, training.last_step):
                log.evaluation(_evaluate(trained, evaluation, state.step))
            if _is_due(state.step, recipe.output.save_every, training.last_step):
                log.save(recipe, state)
    return log.summary(mesh, load_s)


def _step(
    recipe: Recipe, state: TrainState, stream: DataStream, schedule: Schedule, utilization: Utilization | None
) -> StepMetrics:
    """One optimizer step, and what is to be said of it."""
    start_s = time.perf_counter()
    trained, optimizer = cast(Trained, state.trained), schedule.optimizer
    epoch = stream.epoch
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
    step_time_s = time.perf_counter() - start_s
    num_tokens = num_samples * recipe.data.sequence_length
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
        mfu=None if utilization is None else utilization.of(num_tokens, step_time_s),
        skipped=skipped,
    )


def _stream(recipe: Recipe, text: TextData, mesh: Mesh) -> DataStream:
    return DataStream(
        text.train,
        global_batch=recipe.training.global_batch,
        micro_batch=recipe.training.micro_batch,
        dp_rank=mesh.coordinate("dp"),
        dp_degree=mesh.degree("dp"),
        seed=recipe.data.seed,
    )


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint; the folder is made, so that one that cannot be fails the run before its first step."""
    folder.mkdir(parents=True, exist_ok=True)
    return latest(folder)


def _require_equal(ranks: Ranks, recipe: Recipe, text: TextData) -> None:
    """Refuses to train ranks on different recipes or texts, which no collective would notice."""
    mine = {"recipe": recipe.to_json(), "text to train on": text.train.fingerprint}
    everyone = ranks.gather(mine)
    for what in mine:
        differing = [rank for rank, each in enumerate(everyone) if each[what] != everyone[0][what]]
        if differing:
            raise ValueError(
                f"rank {', '.join(map(str, differing))} has another {what} than rank 0; give every rank the same "
                "command line and the same files"
            )


def _origin(ranks: Ranks, path: str | None) -> str | None:
    """The checkpoint whose weights a new run starts from."""
    if path is None:
        return None
    return ranks.on_coordinator(f"start from {path}", lambda: find_checkpoint(path))


def _timed_load(found: Path | None, origin: str | None, state: TrainState, recipe: Recipe) -> float | None:
    """Fills the state from the run's own checkpoint, or the weights alone from another's; gives the seconds taken."""
    start_s = time.perf_counter()
    if origin is not None:
        load_weights(origin, cast(Trained, state.trained), recipe)
    if found is None:
        return None
    refuse_other_model(found, recipe)
    optimizer = cast(Optimizer, state.optimizer)
    wanted = [_hyperparameters(group) for group in optimizer.param_groups]
    try:
        load(found, state)
    except ValueError as error:
        raise in_one_line(error, found, recipe, "; name another output.folder for it") from error
    for group, values in zip(optimizer.param_groups, wanted, strict=True):
        changes = changed_fields(_hyperparameters(group), values, f"{group['name']}.")
        if changes:
            warnings.warn(f"the optimizer changes on resume (saved -> now): {'; '.join(changes)}", stacklevel=2)
        group.update(values)
    return time.perf_counter() - start_s


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """What a recipe says of a group, but for its learning rate, which the schedule sets."""
    return {name: group[name] for name in ("betas", "eps", "weight_decay")}


def _utilization(recipe: Recipe, mesh: Mesh) -> Utilization | None:
    return find_utilization(
        recipe.metrics,
        recipe.model.shape,
        recipe.parallel,
        sequence_length=recipe.data.sequence_length,
        device=mesh.device,
        num_devices=mesh.size,
    )


def _open_sinks(recipe: Recipe, ranks: Ranks, resumed_step: int | None, stack: ExitStack) -> list[MetricsSink]:
    """Where metrics go, on rank 0, nowhere on others; all ranks raise if one cannot be opened."""
    path = recipe.output.metrics

    def open_all() -> list[MetricsSink]:
        return open_sinks(recipe.metrics, path, name=recipe.name, recipe=recipe.to_json(), resumed_step=resumed_step)

    sinks = ranks.together(f"write {path}", open_all if ranks.is_coordinator else list[MetricsSink])
    for each in sinks:
        stack.callback(each.close)
    return sinks


def _evaluation(recipe: Recipe, text: TextData, mesh: Mesh) -> list[Batch]:
    """This rank's held-out micro-batches; none without held-out text."""
    if text.held_out is None:
        return []
    return evaluation_batches(
        text.held_out,
        micro_batch=recipe.training.micro_batch,
        dp_rank=mesh.coordinate("dp"),
        dp_degree=mesh.degree("dp"),
        max_samples=recipe.training.evaluation_sequences or None,
    )


def _evaluate(trained: Trained, batches: list[Batch], step: int) -> EvaluationMetrics | None:
    if not batches:
        return None
    start_s = time.perf_counter()
    result = trained.evaluate(batches)
    return EvaluationMetrics(
        step=step, loss=result.loss, num_tokens=result.num_valid_tokens, time_s=time.perf_counter() - start_s
    )


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _headline(state: TrainState, found: Path | None, origin: str | None, last_step: int) -> str:
    if found is None:
        return "from scratch" if origin is None else f"from the weights of {origin}, else from scratch"
    left = "" if state.step < last_step else f"; nothing is left to do until step {last_step}"
    return f"from {found}: step {state.step}, {state.num_tokens:,} tokens seen{left}"


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.
    """
    command, changes = parse_train(arguments)
    run(train, command.recipe, changes, num_processes=command.nproc, debug=command.debug)


if __name__ == "__main__":
    main()
