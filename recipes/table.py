"""Shows a resolved recipe as a short table."""

from collections.abc import Sequence

from rich.table import Table

from models.registry import family_of
from parallel import Mesh
from recipes.data import TextData
from recipes.metrics import Utilization
from recipes.recipe import Recipe


def recipe_table(
    recipe: Recipe, mesh: Mesh, text: TextData, utilization: Utilization | None, changes: Sequence[str] | None
) -> Table:
    """What a run is about to do, a row for each part of the recipe.

    Args:
        recipe: What to train and how to split it.
        mesh: The mesh that the recipe resolved to.
        text: The text that it trains on.
        utilization: What MFU is computed from; None: it is not shown.
        changes: Fields in which it differs from the recipe that it is named after; None: not known.
    """
    table = Table(title=f"recipe {recipe.name}", show_header=False, title_justify="left", min_width=60)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("model", _model(recipe))
    if recipe.lora.rank:
        table.add_row("adapters", _adapters(recipe))
    table.add_row("layout", _layout(recipe, mesh))
    table.add_row("batch", _batch(recipe, mesh))
    table.add_row("steps", _steps(recipe))
    table.add_row("learning rate", _learning_rate(recipe))
    table.add_row("data", _data(recipe, text))
    table.add_row("output", _output(recipe))
    metrics = _metrics(recipe, utilization)
    if metrics:
        table.add_row("metrics", metrics)
    if changes is not None:
        table.add_row("changed", "\n".join(changes) or "nothing", style="yellow" if changes else None)
    return table


def _model(recipe: Recipe) -> str:
    shape = recipe.model.shape
    return (
        f"{family_of(recipe.model).name}, {_count(recipe.model.num_parameters)} parameters: {shape.num_layers} blocks "
        f"of width {shape.width}, stored in {recipe.training.stored_dtype}"
    )


def _adapters(recipe: Recipe) -> str:
    lora = recipe.lora
    saved = ", saved alone" if recipe.output.adapters_only else ""
    return f"rank {lora.rank}, scaled by {lora.scale:g}, on {', '.join(lora.targets)}; all else is frozen{saved}"


def _layout(recipe: Recipe, mesh: Mesh) -> str:
    precision = recipe.parallel.precision
    words = [mesh.describe()]
    if mesh.config.tp > 1:
        words += [
            f"{'with' if on else 'without'} {name} parallel"
            for name, on in (("sequence", recipe.parallel.sequence_parallel), ("loss", recipe.parallel.loss_parallel))
        ]
    if precision.compute != "stored":
        words.append(f"computes in {precision.compute}")
    return ", ".join(words)


def _batch(recipe: Recipe, mesh: Mesh) -> str:
    training, length, degree = recipe.training, recipe.data.sequence_length, mesh.degree("dp")
    number = training.num_micro_batches(degree)
    return (
        f"{training.global_batch} sequences x {length} tokens = {training.global_batch * length:,} tokens a step; "
        f"{number} micro-batch(es) of {training.micro_batch} on each of {degree} data-parallel rank(s)"
    )


def _steps(recipe: Recipe) -> str:
    training = recipe.training
    stop = "" if training.last_step == training.steps else f", stopping after {training.last_step}"
    return f"{training.steps}{stop}"


def _learning_rate(recipe: Recipe) -> str:
    optimizer, schedule, training = recipe.optimizer, recipe.schedule, recipe.training
    peak = optimizer.at_batch(training.global_batch).lr
    rule = ""
    if optimizer.lr_scaling is not None:
        rule = (
            f" ({optimizer.lr:g} at {optimizer.lr_reference_batch} sequences, scaled by {optimizer.lr_scaling} rule to "
            f"{training.global_batch})"
        )
    return f"up to {peak:g}{rule} in {schedule.warmup_steps} steps, {schedule.describe(training.steps)}"


def _data(recipe: Recipe, text: TextData) -> str:
    held_out = "nothing held out"
    if text.held_out is not None:
        # Of few files another share than was asked for.
        share = text.held_out.num_tokens / (text.train.num_tokens + text.held_out.num_tokens)
        held_out = f"{_count(text.held_out.num_tokens)} held out ({100 * share:.2g} %)"
    # The last step of an epoch is shorter, never filled from the next.
    epochs = recipe.training.steps / -(-text.train.num_samples // recipe.training.global_batch)
    return f"{recipe.data.source}: {_count(text.train.num_tokens)} tokens, {held_out}; {epochs:.2g} epochs"


def _output(recipe: Recipe) -> str:
    output = recipe.output
    when = f"every {output.save_every} steps and at the end" if output.save_every else "at the end"
    return f"{output.folder}: a checkpoint {when}, {f'the newest {output.keep}' if output.keep else 'all'} kept"


def _metrics(recipe: Recipe, utilization: Utilization | None) -> str:
    config = recipe.metrics
    words = [] if utilization is None else [utilization.describe()]
    words += ["TensorBoard"] if config.tensorboard else []
    words += [] if config.wandb_project is None else [f"W&B project {config.wandb_project}"]
    return "; ".join(words)


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return str(number)
