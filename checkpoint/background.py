"""Saves while training goes on."""

import os
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch import Tensor

from checkpoint import store, writer
from checkpoint.ranks import Ranks
from checkpoint.retention import Retention
from checkpoint.save_plan import SavePlan
from checkpoint.state import TrainState


class BackgroundSaver:
    """Saves as `save` does, but training waits only until this rank's part is copied to host memory.

    The copy is what is saved, whatever training changes meanwhile. Its memory, as much as this rank writes and pinned
    where the state is on a GPU, is taken at the first save and used again. One save is under way at a time; its error
    comes with the next call, with the end of `with`, or as a warning when the process ends. All ranks of the job make
    the same calls together.
    """

    def __init__(self, folder: str | os.PathLike[str], retention: Retention | None = None) -> None:
        """Starts a process group of its own, in which ranks agree beside training.

        Args:
            folder: As in `save`.
            retention: As in `save`; older checkpoints go in the background too.
        """
        self._folder, self._retention = Path(folder), retention
        self._ranks = Ranks()
        # Collectives of two threads would meet in one group.
        self._group = dist.new_group(backend="gloo") if self._ranks.is_distributed else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background-save")
        self._rooms: dict[str, Tensor] = {}
        self._pending: list[Future[Path]] = []
        weakref.finalize(self, _report, self._pending)

    def __enter__(self) -> Self:
        """Nothing to do yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for a save under way; no further one can start.

        Raises:
            OSError: If it failed.
        """
        try:
            self.finish()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"besides, a save in the background failed: {failure}")
        finally:
            self._thread.shutdown()
            self._rooms.clear()

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way on this rank."""
        return any(not each.done() for each in self._pending)

    def save(self, state: TrainState) -> None:
        """Copies a state and starts to write it, after the save before it, if that is still under way.

        Args:
            state: What to save; may change as soon as this returns.

        Raises:
            OSError: If the save before it failed; this one does not start then.
            RuntimeError: If there was no memory for the copy of the one before it.
            ValueError: If the state cannot be saved.
        """
        self.finish()
        planned = store.plan(self._folder, state, self._ranks)
        copied: Future[SavePlan] = Future()
        try:
            copied.set_result(writer.snapshot(planned, self._rooms))
        except Exception as error:
            # The others hear of it where nothing waits for the slowest rank. Its frames refer to this saver.
            copied.set_exception(error.with_traceback(None))
        ranks = Ranks(self._group)
        # Nothing that refers to this saver, so that one which nobody has any more can report.
        self._pending.append(self._thread.submit(_write, self._folder, copied, self._retention, ranks))

    def finish(self) -> Path | None:
        """Waits for the save that is under way, if any.

        Returns:
            Its checkpoint.

        Raises:
            OSError: If it failed, on all ranks.
            RuntimeError: If there was no memory for its copy, on any rank.
        """
        return self._pending.pop().result() if self._pending else None


def _write(folder: Path, copied: Future[SavePlan], retention: Retention | None, ranks: Ranks) -> Path:
    saved = ranks.together("copy the state to host memory", copied.result)
    return store.commit(folder, saved, retention, ranks)


def _report(pending: list[Future[Path]]) -> None:
    """Tells of a failure that nobody has asked for."""
    for each in pending:
        error = each.exception()
        if error is not None:
            warnings.warn(f"a save in the background failed: {error}", stacklevel=2)
