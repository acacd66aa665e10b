"""What becomes of signals that reach a rank, or the launcher, at an odd moment."""

import os
import signal

import pytest

from recipes.signals import ended_unheard, forward_signals


def test_a_rank_that_has_just_been_forked_is_ended_by_a_signal() -> None:
    with forward_signals([signal.SIGUSR1]) as came:
        rank = os.fork()
        if rank == 0:
            try:
                signal.raise_signal(signal.SIGUSR1)
            finally:
                os._exit(0)
        _, status = os.waitpid(rank, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGUSR1
    assert came == []


@pytest.mark.parametrize(
    ("ended_by", "forwarded", "unheard"),
    [
        (signal.SIGTERM, [signal.SIGTERM], True),
        (signal.SIGINT, [signal.SIGINT], True),
        # Somebody sent it to one rank alone.
        (signal.SIGUSR1, [], True),
        # The second Ctrl-C of a rank that listens, which was faster than the launcher's SIGKILL.
        (signal.SIGINT, [signal.SIGINT, signal.SIGINT], False),
        (signal.SIGINT, [], False),
        (signal.SIGKILL, [signal.SIGTERM], False),
        (signal.SIGKILL, [], False),
        (signal.SIGSEGV, [], False),
    ],
)
def test_a_run_is_to_be_repeated_where_no_rank_listened_to_the_signal(
    ended_by: signal.Signals, forwarded: list[signal.Signals], unheard: bool
) -> None:
    assert ended_unheard(ended_by, forwarded) == unheard
