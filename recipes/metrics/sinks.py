"""Where the metrics of a run go, beside the console."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from recipes.metrics.config import MetricsConfig
from recipes.metrics.file import MetricsFile
from recipes.metrics.records import EvaluationMetrics, StepMetrics


class MetricsSink(Protocol):
    """Takes what a run says of its steps; rank 0 alone should hold one."""

    def write(self, metrics: StepMetrics | EvaluationMetrics) -> None:
        """Takes one record."""
        ...

    def close(self) -> None:
        """Brings what is left to its place."""
        ...


def open_sinks(
    config: MetricsConfig, path: Path, *, name: str, recipe: Mapping[str, Any], resumed_step: int | None
) -> list[MetricsSink]:
    """Opens the metrics file, and what else a config asks for.

    Args:
        config: What it asks for.
        path: The metrics file; the others write beside it.
        name: Name of the recipe.
        recipe: The recipe as JSON.
        resumed_step: Step of the checkpoint that the run resumes from; None: a new run.

    Raises:
        ValueError: If one cannot be opened.
    """
    sinks: list[MetricsSink] = [MetricsFile(path, resumed_step=resumed_step)]
    if config.tensorboard:
        sinks.append(TensorBoard(path.parent / "tensorboard", resumed_step=resumed_step))
    if config.wandb_project is not None:
        sinks.append(
            WeightsAndBiases(config.wandb_project, path.parent, name=name, recipe=recipe, resumed_step=resumed_step)
        )
    return sinks


class TensorBoard:
    """Event files of TensorBoard."""

    def __init__(self, folder: Path, *, resumed_step: int | None = None) -> None:
        """Starts a new event file.

        Args:
            folder: Where.
            resumed_step: Step of the checkpoint that the run resumes from: what earlier files say of later steps is
                hidden. None: a new run, all of it is.

        Raises:
            ValueError: If TensorBoard is not installed, or the folder cannot be written.
        """
        MetricsConfig(tensorboard=True).check_installed()
        from torch.utils.tensorboard.writer import SummaryWriter

        try:
            self._writer = SummaryWriter(str(folder), purge_step=(resumed_step or 0) + 1)
        except OSError as error:
            raise ValueError(f"cannot write to {str(folder)!r}: {error.strerror}") from error

    def write(self, metrics: StepMetrics | EvaluationMetrics) -> None:
        """Writes each number of a record.

        Args:
            metrics: The record.
        """
        for tag, value in metrics.scalars().items():
            self._writer.add_scalar(tag, value, metrics.step)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, the same one again after a resume."""

    def __init__(
        self, project: str, folder: Path, *, name: str, recipe: Mapping[str, Any], resumed_step: int | None = None
    ) -> None:
        """Starts the run, or goes on with the one that an id in the folder names.

        Args:
            project: Name of the project.
            folder: Folder of the run; W&B keeps its own files there.
            name: Name of the run.
            recipe: Shown as its configuration.
            resumed_step: Step of the checkpoint that the run resumes from; None: a new run.

        Raises:
            ValueError: If W&B is not installed, or refuses.
        """
        MetricsConfig(wandb_project=project).check_installed()
        import wandb

        file = folder / "wandb-id.txt"
        try:
            if resumed_step is None or not file.exists():
                file.write_text(secrets.token_hex(8), encoding="utf-8")
            self._run = wandb.init(
                project=project,
                name=name,
                id=file.read_text(encoding="utf-8"),
                resume="allow",
                dir=str(folder),
                config=dict(recipe),
            )
        except Exception as error:  # the package has errors of many kinds
            raise ValueError(
                f"cannot log to W&B: {error}; log in, set WANDB_MODE=offline, or leave wandb_project out"
            ) from error

    def write(self, metrics: StepMetrics | EvaluationMetrics) -> None:
        """Logs each number of a record.

        Args:
            metrics: The record.
        """
        self._run.log(metrics.scalars(), step=metrics.step)

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()
