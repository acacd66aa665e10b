"""Writes the checkpoints of a run as its recipe says."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from checkpoint import BackgroundSaver, TrainState, save
from checkpoint.ranks import Ranks
from recipes.adapters import adapters_of_state
from recipes.folder_lock import FolderLock
from recipes.recipe import OutputConfig
from recipes.run_log import RunLog


class Saving:
    """Saves at once or in the background, and says so; every rank does all of this together.

    Attributes:
        log: Who is told.
    """

    def __init__(self, output: OutputConfig, log: RunLog, lock: FolderLock) -> None:
        """Saves nothing yet; use it as a context manager, which waits at its end.

        Args:
            output: Where and how to save.
            log: Who is told.
            lock: Rank 0's hold on the folder.
        """
        self.log = log
        self._output, self._lock, self._ranks = output, lock, Ranks()
        self._background = BackgroundSaver(output.checkpoints, output.retention) if output.save_in_background else None
        self._stall_s = 0.0

    def __enter__(self) -> Self:
        """Nothing to do yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for a save in the background."""
        if self._background is not None:
            self._background.__exit__(kind, error, traceback)

    @property
    def is_writing(self) -> bool:
        """Whether a save goes on in the background of this rank."""
        return self._background is not None and self._background.is_writing

    def save(self, state: TrainState, *, last: bool) -> None:
        """Saves, or starts to.

        Args:
            state: What to save.
            last: Whether the run ends here: the save is waited for, and its failure is an error whatever the recipe.

        Raises:
            OSError: If the file system fails, unless the recipe says to continue.
        """
        self.collect()
        start_s = time.perf_counter()
        if self._output.adapters_only:
            state = adapters_of_state(state)
        self._ranks.on_coordinator(f"save step {state.step}", self._lock.check)
        with self._failing(last):
            if self._background is not None:
                self._background.save(state)
                self._stall_s = time.perf_counter() - start_s
            else:
                path = save(self._output.checkpoints, state, self._output.retention)
                self.log.saved(path, time.perf_counter() - start_s)
        if last:
            self.collect(last=True)

    def collect(self, *, last: bool = False) -> None:
        """Takes note of what became of a save in the background; waits for one that is under way.

        Args:
            last: As in `save`.

        Raises:
            OSError: As in `save`.
        """
        with self._failing(last):
            path = None if self._background is None else self._background.finish()
            if path is not None:
                self.log.saved(path, self._stall_s)

    @contextmanager
    def _failing(self, last: bool) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if last or self._output.on_failed_save == "stop":
                raise
            warnings.warn(f"{error}; the run continues without this checkpoint", stacklevel=3)
