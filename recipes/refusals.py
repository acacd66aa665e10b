"""Says what is wrong with a command line in one form, whether the parser finds it or the classes that it fills."""

import contextlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from recipes.messages import one_message

PARSER = "tyro."
"""Where the parser's own modules are."""


@contextmanager
def in_one_form(words: Sequence[str]) -> Iterator[None]:
    """Says what is wrong with a command line in one form, whoever finds it.

    What this toolkit's own classes refuse is a line and an error like any other; the parser would put it into a box.
    Unknown options, and words that are no value of their type, are left to the parser, which ends with exit code 2; but
    the `name=value,...` of a config is this toolkit's to read.

    Args:
        words: Of the command line that is parsed within.

    Raises:
        SystemExit: After the help or an error message.
    """
    try:
        with contextlib.redirect_stderr(_WithoutBoxes(sys.stderr)):
            yield
    except SystemExit as end:
        refusal = _own_refusal(end)
        if refusal is None:
            raise
        with one_message(debug="--debug" in words):
            raise refusal from None


class _WithoutBoxes:
    """Standard error without what the parser writes of an own refusal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        frame = inspect.currentframe()
        writer = frame.f_back.f_globals["__name__"] if frame and frame.f_back else ""
        if writer.startswith(PARSER) and _own_refusal(sys.exception()):
            return len(text)
        return self._stream.write(text)


def _own_refusal(error: BaseException | None) -> ValueError | None:
    """The error of a class or function of this toolkit's, upon which the parser ended; None: it had reasons itself.

    Args:
        error: How the parser ended, or what it handles.
    """
    while error is not None:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        own = not frames[-1].f_globals["__name__"].startswith(PARSER) if frames else False
        if isinstance(error, ValueError) and own:
            return error
        error = error.__context__
    return None
