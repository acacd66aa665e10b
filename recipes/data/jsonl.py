"""Reads the lines of JSONL files."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from recipes.data.documents import Reader, UnusableError
from recipes.data.files import SourceFile

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLOCK_BYTES = 1 << 20


def read_jsonl(files: Sequence[SourceFile], reader: Reader) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of the files' lines, and where each is; lines of white space are none.

    Args:
        files: The files.
        reader: Takes what cannot be used, which no object is made of.

    Raises:
        ValueError: If a file cannot be read, or a file or line cannot be used and such are not left out.
    """
    for file in files:
        num_lines = 0
        try:
            with open(file.path, "rb") as opened:
                for number, line in enumerate(_lines(opened, reader), start=1):
                    if line is not None and not line.strip():
                        continue
                    num_lines += 1
                    where = f"{file.path!r}, line {number}"
                    try:
                        yield where, _object(line, reader.max_record_bytes)
                    except UnusableError as error:
                        reader.problems.add(where, str(error))
        except OSError as error:
            raise ValueError(f"cannot read {file.path!r} (data source): {error.strerror}") from error
        if num_lines == 0:
            reader.problems.add(repr(file.path), "an empty file")


def _lines(opened: BinaryIO, reader: Reader) -> Iterator[bytes | None]:
    """Each line, or None for one that is too long, of which no more than that is ever held."""
    limit, first = reader.max_record_bytes, True
    while line := opened.readline(limit + 1):
        num_bytes, text = len(line), line
        # What is beyond the limit may be the line break alone.
        too_long = len(line.rstrip(b"\r\n")) > limit
        while not line.endswith(b"\n") and (line := opened.readline(_BLOCK_BYTES)):
            num_bytes += len(line)
            too_long = too_long or bool(line.strip(b"\r\n"))
        reader.advance(num_bytes)
        yield None if too_long else text.removeprefix(_BYTE_ORDER_MARK) if first else text
        first = False


def _object(line: bytes | None, limit: int) -> dict[str, Any]:
    if line is None:
        raise UnusableError(f"longer than max_record_bytes={limit}")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnusableError(f"not UTF-8 text ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UnusableError(f"no JSON object but {type(value).__name__}")
    return value
