"""What a reader of files gives: documents, and a count of what cannot be used."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from recipes.data.tokenizer import Tokenizer


class Segment(NamedTuple):
    """A part of a document.

    Attributes:
        content: Text, in UTF-8 unless the tokenizer takes any bytes, or one token.
        learned: Whether its tokens are predicted, so that they enter the loss.
    """

    content: bytes | int
    learned: bool = True


@dataclass(frozen=True, kw_only=True)
class Document:
    """One piece of text that belongs together: a file or a part of one, or a record.

    Attributes:
        name: Where it is.
        segments: Its parts in order, bos and eos included; they may be read from the file only as they are taken,
            and only once.
        held_out: Whether it is evaluated on instead of trained on.
    """

    name: str
    segments: Iterable[Segment]
    held_out: bool = False


class UnusableError(Exception):
    """A file or record cannot be used; the message says why, not where."""


class Problems:
    """Counts the files and records that cannot be used, or stops at the first.

    Attributes:
        num_skipped: How many were left out.
        first: Where and why the first one was.
        num_empty: Text files left out because they hold no text, which is no fault.
    """

    def __init__(self, *, skip: bool) -> None:
        """Starts with none.

        Args:
            skip: Count them, instead of raising.
        """
        self._skip = skip
        self.num_skipped = 0
        self.first = ""
        self.num_empty = 0

    def add(self, where: str, why: str) -> None:
        """Takes note of one.

        Args:
            where: Which file, and where in it.
            why: What is wrong.

        Raises:
            ValueError: If they are not to be left out.
        """
        self.num_skipped += 1
        self.first = self.first or f"{where}: {why}"
        if not self._skip:
            refuse_problem(self.first)


def refuse_problem(first: str) -> NoReturn:
    """Raises for the first thing that cannot be used.

    Args:
        first: Where and why.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"cannot use {first}; mend it, or leave out and count all such data with on_error='skip'")


@dataclass(frozen=True, kw_only=True)
class Reader:
    """What every reader of files is given.

    Attributes:
        tokenizer: What the documents are read for.
        problems: Takes what cannot be used.
        advance: Takes note of bytes that have been read.
        max_record_bytes: A longer record cannot be used.
    """

    tokenizer: Tokenizer
    problems: Problems
    advance: Callable[[int], None]
    max_record_bytes: int
