"""The training loop and its command: `python -m recipes.train RECIPE [overrides]`."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path

import torch

from checkpoint import TrainState, latest, load, read_manifest
from checkpoint.ranks import Ranks
from models.registry import family_of
from parallel import Batch, Mesh, Trained, build_mesh, materialize, parallelize
from parallel.materialize import allocate
from recipes.command import parse_train
from recipes.data import DataStream, TextData, evaluation_batches, load_dataset
from recipes.launch import run
from recipes.metrics import EvaluationMetrics, MetricsFile, Reporter, StepMetrics, peak_bytes
from recipes.optimizer import adamw_factory
from recipes.recipe import Recipe, changed_fields
from recipes.run_log import RunLog, TrainSummary
from recipes.schedule import WarmupCosine
from recipes.table import recipe_table


def train(recipe: Recipe, changes: Sequence[str] | None = None) -> TrainSummary:
    """Trains a recipe, from its newest checkpoint or from scratch; every rank of the job calls this.

    Args:
        recipe: What to train and how to split it.
        changes: Fields in which it differs from the recipe that it is named after, to be shown; None: not known.

    Returns:
        What the run did.

    Raises:
        ValueError: On every rank, if the recipe does not fit the ranks, the data or the checkpoint.
        OSError: On every rank, if something cannot be written.
    """
    mesh, ranks, training = build_mesh(recipe.parallel), Ranks(), recipe.training
    trained = build_model(recipe, mesh)
    text = ranks.together("read the text", lambda: load_dataset(recipe.data))
    _require_equal(ranks, recipe, text)
    stream = _stream(recipe, text, mesh)
    found = ranks.on_coordinator(f"use {recipe.output.checkpoints}", lambda: _newest(recipe.output.checkpoints))
    if found is None:
        materialize(trained, seed=training.seed)
    else:
        allocate(trained)
    optimizer = trained.build_optimizer(adamw_factory(recipe.optimizer))
    schedule = WarmupCosine(optimizer, recipe.schedule, training.steps)
    state = TrainState(
        trained=trained,
        optimizer=optimizer,
        stateful={"schedule": schedule, "data": stream},
        recipe=recipe.to_json(),
    )
    load_s = None if found is None else _timed_load(found, state, recipe)

    with ExitStack() as stack:
        file = stack.enter_context(_open_metrics(recipe, ranks, None if found is None else state.step))
        reporter = stack.enter_context(
            Reporter(
                total_steps=training.steps, rank=ranks.rank, done_steps=state.step, every_steps=recipe.output.log_every
            )
        )
        reporter.table(recipe_table(recipe, mesh, text, changes))
        reporter.message(_headline(state, found, training.last_step))
        log = RunLog(reporter, file, state.step)
        evaluation = _evaluation(recipe, text, mesh)
        while state.step < training.last_step:
            start_s = time.perf_counter()
            epoch = stream.epoch
            result = trained.forward_backward(stream.next_step())
            norm = float("nan")
            if not result.skipped:
                norm = trained.clip_gradients(training.max_gradient_norm).item()
                optimizer.step()
            learning_rate = optimizer.param_groups[0]["lr"]
            schedule.step()
            state.step += 1
            state.num_tokens += result.num_valid_tokens
            log.step(
                StepMetrics(
                    step=state.step,
                    total_steps=training.steps,
                    epoch=epoch,
                    loss=result.loss,
                    gradient_norm=norm,
                    learning_rate=learning_rate,
                    num_tokens=result.num_valid_tokens,
                    tokens_seen=state.num_tokens,
                    step_time_s=time.perf_counter() - start_s,
                    peak_bytes=peak_bytes(mesh.device),
                    skipped=result.skipped,
                )
            )
            if _is_due(state.step, training.evaluate_every, training.last_step):
                log.evaluation(_evaluate(trained, evaluation, state.step))
            if _is_due(state.step, recipe.output.save_every, training.last_step):
                log.save(recipe, state)
    return log.summary(mesh, load_s)


def build_model(recipe: Recipe, mesh: Mesh) -> Trained:
    """The recipe's model, laid out on a mesh, its parameters still on meta.

    Args:
        recipe: What to train and how to split it.
        mesh: The mesh of `recipe.parallel`.
    """
    family = family_of(recipe.model)
    with torch.device("meta"):
        model = family.build(recipe.model).to(getattr(torch, recipe.training.stored_dtype))
    return parallelize(model, mesh, recipe.parallel, family.plan(recipe.model))


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


def _timed_load(path: Path, state: TrainState, recipe: Recipe) -> float:
    start_s = time.perf_counter()
    try:
        load(path, state)
    except ValueError as error:
        saved = read_manifest(path).header.recipe
        changes = changed_fields(saved.get("model", {}), recipe.to_json()["model"], "model.")
        if not changes:
            raise
        raise ValueError(
            f"{str(error).splitlines()[0]}: the model is another one (saved -> now): {'; '.join(changes)}; name "
            "another output.folder for it"
        ) from error
    return time.perf_counter() - start_s


def _open_metrics(recipe: Recipe, ranks: Ranks, resumed_step: int | None) -> AbstractContextManager[MetricsFile | None]:
    """The metrics file on rank 0, nothing on others; all ranks raise if it cannot be written."""
    path = recipe.output.metrics
    open_file = partial(MetricsFile, path, resumed_step=resumed_step)
    opened = ranks.together(f"write {path}", open_file if ranks.is_coordinator else lambda: None)
    return closing(opened) if opened is not None else nullcontext()


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


def _headline(state: TrainState, found: Path | None, last_step: int) -> str:
    if found is None:
        return "from scratch"
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
