"""The progress of a run on the console."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from recipes.metrics.records import EvaluationMetrics, StepMetrics


class Reporter:
    """A progress bar with lines above it on a terminal, lines alone elsewhere, nothing on ranks other than 0."""

    def __init__(
        self,
        *,
        total_steps: int,
        rank: int = 0,
        done_steps: int = 0,
        every_steps: int = 10,
        console: Console | None = None,
    ) -> None:
        """Shows nothing yet; use it as a context manager.

        Args:
            total_steps: Optimizer steps of the run.
            rank: Rank of this process.
            done_steps: Steps done before a resume.
            every_steps: A line for every so many steps, and for the first and the last.
            console: Where to write; None: standard output.
        """
        self._first_step, self._total_steps, self._every_steps = done_steps + 1, total_steps, every_steps
        self._console = console or Console(highlight=False)
        self._silent = rank != 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=self._silent or not self._console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=done_steps)

    def __enter__(self) -> Self:
        """Shows the bar."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Removes the bar."""
        self._progress.stop()

    def step(self, metrics: StepMetrics) -> None:
        """Moves the bar; writes a line where one is due.

        Args:
            metrics: The step done.
        """
        self._progress.update(self._task, completed=metrics.step, description=f"loss {metrics.loss:.3f}")
        due = metrics.step % self._every_steps == 0 or metrics.step in (self._first_step, self._total_steps)
        if due or metrics.skipped:
            self.message(metrics.line())

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Writes a line.

        Args:
            metrics: The evaluation done.
        """
        self.message(metrics.line())

    def message(self, text: str) -> None:
        """Writes a line of plain text.

        Args:
            text: The line.
        """
        if not self._silent:
            self._console.print(text, markup=False, soft_wrap=True)

    def table(self, table: Table) -> None:
        """Shows a table.

        Args:
            table: What to show.
        """
        if not self._silent:
            self._console.print(table)
