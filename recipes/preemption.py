"""Stops a run on a signal: all ranks after the same step."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from recipes.signals import REPEAT_S, STOP_SIGNALS, handlers


class StopRequest:
    """What signals have asked of this rank.

    Attributes:
        signal: The first one that came; None before.
    """

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self.signal: signal.Signals | None = None
        self._since_s = 0.0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal; a second Ctrl-C ends the process at once.

        Args:
            number: The signal.
            frame: Where it came; does not matter.
        """
        if self.signal is None:
            self.signal, self._since_s = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since_s > REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Keeps `STOP_SIGNALS` from ending this process for a while; only the main thread can call this."""
    request = StopRequest()
    with handlers(STOP_SIGNALS, request.note):
        yield request


def agree(request: StopRequest, writing: bool) -> tuple[signal.Signals | None, bool]:
    """Makes one of what the ranks find between two steps; all of them call this together.

    Args:
        request: What this rank was asked.
        writing: Whether a save goes on in the background of this rank.

    Returns:
        A signal that came to some rank, and whether some rank is still writing.
    """
    # In host memory, so that no rank waits for its GPU.
    found = torch.tensor([request.signal or 0, int(writing)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    number, still_writing = found.tolist()
    return signal.Signals(number) if number else None, bool(still_writing)
