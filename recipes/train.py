"""The training loop and its command: `python -m recipes.train RECIPE [overrides]`."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from checkpoint import TrainState
from checkpoint.ranks import Ranks
from checkpoint.state import Stateful
from parallel import Mesh, build_mesh
from recipes.adapters import BASE
from recipes.command import parse_train
from recipes.data import DataStream, TextData, load_dataset
from recipes.folder_lock import FolderLock
from recipes.held_out import HeldOut
from recipes.launch import run
from recipes.messages import STOPPED, leave, stopped_early
from recipes.metrics import MetricsSink, Reporter, Utilization, find_utilization, open_sinks
from recipes.model import build_model
from recipes.optimizer import adamw_factory
from recipes.optimizer_step import take_step
from recipes.preemption import agree, listen
from recipes.recipe import Recipe
from recipes.resume import Start
from recipes.run_log import RunLog, TrainSummary
from recipes.saving import Saving
from recipes.schedule import Schedule
from recipes.signals import STOP_SIGNALS, handlers
from recipes.table import recipe_table


def train(recipe: Recipe, changes: Sequence[str] | None = None) -> TrainSummary:
    """Trains a recipe, from its newest checkpoint or from the start; every rank of the job calls this.

    SIGTERM, SIGUSR1 or Ctrl-C on any rank ends it early: all ranks save after the same step.

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
    lock = FolderLock(recipe.output.folder)
    with ExitStack() as stack:
        ranks.on_coordinator(f"use {recipe.output.folder}", partial(_enter, lock, stack))
        return _train(recipe, mesh, ranks, lock, changes)


def _enter(lock: FolderLock, stack: ExitStack) -> None:
    """Takes the folder on one rank; the lock itself does not travel to the others."""
    stack.enter_context(lock)


def _train(recipe: Recipe, mesh: Mesh, ranks: Ranks, lock: FolderLock, changes: Sequence[str] | None) -> TrainSummary:
    """Trains a recipe in a folder that is its own."""
    trained = build_model(recipe, mesh)
    start = Start.find(recipe, ranks)
    text = ranks.together("read the text", lambda: load_dataset(recipe.data))
    _require_equal(ranks, recipe, text)
    stream = _stream(recipe, text, mesh)
    start.initialize(trained, recipe)
    optimizer = trained.build_optimizer(adamw_factory(recipe.optimizer.at_batch(recipe.training.global_batch)))
    schedule = Schedule(optimizer, recipe.schedule, recipe.training.steps)
    stateful: dict[str, Stateful] = {"schedule": schedule, "data": stream}
    if start.base is not None:
        stateful[BASE] = start.base
    if trained.loss_scale is not None:
        stateful["loss_scale"] = trained.loss_scale
    state = TrainState(
        trained=trained,
        optimizer=optimizer,
        stateful=stateful,
        recipe=recipe.to_json(),
    )
    load_s = start.load(state, recipe)
    utilization = _utilization(recipe, mesh)
    with ExitStack() as stack:
        sinks = _open_sinks(recipe, ranks, None if start.own is None else state.step, stack)
        reporter = stack.enter_context(_reporter(recipe, ranks, state))
        reporter.table(recipe_table(recipe, mesh, text, utilization, changes))
        reporter.message(start.headline(state, recipe.training.last_step))
        log = RunLog(reporter, sinks, state.step)
        saving = stack.enter_context(Saving(recipe.output, log, lock))
        _loop(recipe, state, HeldOut(recipe, text, mesh), utilization, saving)
    return log.summary(mesh, load_s)


def _loop(
    recipe: Recipe, state: TrainState, held_out: HeldOut, utilization: Utilization | None, saving: Saving
) -> None:
    """Trains until the last step or a signal."""
    training, log = recipe.training, saving.log
    with listen() as request:
        while state.step < training.last_step:
            log.step(take_step(recipe, state, utilization))
            stopped_by, writing = agree(request, saving.is_writing)
            if not writing:
                saving.collect()
            if stopped_by is not None and state.step < training.last_step:
                # Whoever sent the signal may not wait for an evaluation.
                saving.save(state, last=True)
                log.stopped(stopped_by, state.step)
                return
            if _is_due(state.step, training.evaluate_every, training.last_step):
                log.evaluation(held_out.evaluate(state))
            if _is_due(state.step, recipe.output.save_every, training.last_step):
                saving.save(state, last=state.step == training.last_step)


def _stream(recipe: Recipe, text: TextData, mesh: Mesh) -> DataStream:
    return DataStream(
        text.train,
        global_batch=recipe.training.global_batch,
        micro_batch=recipe.training.micro_batch,
        dp_rank=mesh.coordinate("dp"),
        dp_degree=mesh.degree("dp"),
        seed=recipe.data.seed,
    )


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


def _utilization(recipe: Recipe, mesh: Mesh) -> Utilization | None:
    if recipe.lora.rank:
        return None  # no gradients of frozen weights are computed, which the count of operations would take for work
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


def _reporter(recipe: Recipe, ranks: Ranks, state: TrainState) -> Reporter:
    steps, every = recipe.training.steps, recipe.output.log_every
    return Reporter(total_steps=steps, rank=ranks.rank, done_steps=state.step, every_steps=every)


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: With `STOPPED` if a signal ended the run, and with another code if it failed.
    """
    with handlers(STOP_SIGNALS, lambda number, frame: stopped_early(number)):
        command, changes = parse_train(arguments)
        summary: TrainSummary = run(
            train, command.recipe, changes, num_processes=command.nproc, debug=command.debug, resumes=True
        )
    if summary.stopped_by is not None:
        leave(STOPPED)


if __name__ == "__main__":
    main()
