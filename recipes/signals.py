"""What the process that starts the ranks does with the signals that it gets."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from types import FrameType

REPEAT_S = 1.0
"""A terminal sends Ctrl-C to launcher and ranks alike, and the launcher sends it on: only after this it is a second."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Upon these a run saves and stops. Others end a run at once and save nothing: SIGQUIT, whose purpose that is, and
SIGHUP, which leaves no terminal to write to; a run that is to outlive its terminal needs nohup, tmux or a job
scheduler."""


class EndedBySignal(BaseException):
    """A signal came when no rank could listen to it, so that it ended them or kept them from starting.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        """Keeps the signal.

        Args:
            number: The signal.
        """
        super().__init__(number)
        self.number = number


@contextmanager
def forward_signals(signals: Iterable[signal.Signals]) -> Iterator[list[int]]:
    """Sends signals on to all ranks that this process has started, which know what to do; a second Ctrl-C kills them.

    Args:
        signals: The signals.

    Yields:
        Those that have come; the list grows.

    Raises:
        EndedBySignal: If one comes where there is no rank.
    """
    came: list[int] = []
    first_s, launcher = 0.0, os.getpid()

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if os.getpid() != launcher:
            # Of a rank, forked with this handler, which nothing has replaced yet.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        children = active_children()
        if not children:
            raise EndedBySignal(number)
        again = bool(came) and number == signal.SIGINT and time.monotonic() - first_s > REPEAT_S
        first_s = first_s or time.monotonic()
        came.append(number)
        for each in children:
            with suppress(ProcessLookupError):
                os.kill(each.pid or 0, signal.SIGKILL if again else number)

    with handlers(signals, forward):
        yield came


def ended_unheard(ended_by: int, forwarded: Sequence[int]) -> bool:
    """Whether a rank was ended by a signal to stop because it did not listen to it: no step went on.

    Args:
        ended_by: The signal that ended it.
        forwarded: What has come to the launcher. A second signal ends ranks that do listen, and so does a second SIGINT
            that came to the rank alone.
    """
    if forwarded:
        return list(forwarded) == [ended_by]
    return ended_by in STOP_SIGNALS and ended_by != signal.SIGINT


@contextmanager
def handlers(
    signals: Iterable[signal.Signals], handler: signal.Handlers | Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Sets a handler of signals for a while.

    Args:
        signals: The signals.
        handler: What handles them.
    """
    before = {each: signal.signal(each, handler) for each in signals}
    try:
        yield
    finally:
        for each, own in before.items():
            # None is a handler that Python has not set, and cannot.
            if own is not None:
                signal.signal(each, own)
