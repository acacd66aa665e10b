"""The training loop and its command: `python -m recipes.train RECIPE [overrides]`."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint import TrainState, latest, load, read_manifest, save
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
from recipes.schedule import WarmupCosine
from recipes.table import recipe_table


@dataclass(frozen=True, kw_only=True)
class TrainSummary:
    """What a run did, the same on every rank.

    Attributes:
        mesh: The layout in a few words.
        first_step: Optimizer steps done before it.
        last_step: Optimizer steps done after it.
        first_loss: Loss of its first step, in nats a token.
        last_loss: Loss of its last step.
        held_out_loss: Loss on held-out text after it; None without such text.
        tokens_per_s: Valid tokens a second over all ranks, by the median step.
        peak_bytes: Peak memory of the fullest rank.
        save_s: Seconds that the last checkpoint took.
        load_s: Seconds that loading took; None for a new run.
    """

    mesh: str
    first_step: int
    last_step: int
    first_loss: float
    last_loss: float
    held_out_loss: float | None
    tokens_per_s: float
    peak_bytes: int
    save_s: float
    load_s: float | None


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


class RunLog:
    """Tells console and file what happened, and sums it up."""

    def __init__(self, reporter: Reporter, file: MetricsFile | None, first_step: int) -> None:
        """Starts with nothing done.

        Args:
            reporter: The console.
            file: The metrics file; None on ranks other than 0.
            first_step: Optimizer steps done before.
        """
        self._reporter, self._file = reporter, file
        self._first_step, self._steps = first_step, list[StepMetrics]()
        self._held_out_loss: float | None = None
        self._save_s = 0.0

    def step(self, metrics: StepMetrics) -> None:
        """Takes note of a step."""
        self._steps.append(metrics)
        self._reporter.step(metrics)
        if self._file is not None:
            self._file.write(metrics)

    def evaluation(self, metrics: EvaluationMetrics | None) -> None:
        """Takes note of an evaluation, if there was one."""
        if metrics is None:
            return
        self._held_out_loss = metrics.loss
        self._reporter.evaluation(metrics)
        if self._file is not None:
            self._file.write(metrics)

    def save(self, recipe: Recipe, state: TrainState) -> None:
        """Writes a checkpoint and takes note of it."""
        start_s = time.perf_counter()
        path = save(recipe.output.checkpoints, state, keep=recipe.output.keep or None)
        self._save_s = time.perf_counter() - start_s
        self._reporter.message(f"after step {state.step}: saved {path} in {self._save_s:.2f} s")

    def summary(self, mesh: Mesh, load_s: float | None) -> TrainSummary:
        """What the run did; every rank calls this together."""
        peak = torch.tensor(peak_bytes(mesh.device), device=mesh.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        rates = sorted(each.tokens_per_s for each in self._steps)
        return TrainSummary(
            mesh=mesh.describe(),
            first_step=self._first_step,
            last_step=self._steps[-1].step if self._steps else self._first_step,
            first_loss=self._steps[0].loss if self._steps else float("nan"),
            last_loss=self._steps[-1].loss if self._steps else float("nan"),
            held_out_loss=self._held_out_loss,
            tokens_per_s=rates[len(rates) // 2] if rates else 0.0,
            peak_bytes=int(peak.item()),
            save_s=self._save_s,
            load_s=load_s,
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
