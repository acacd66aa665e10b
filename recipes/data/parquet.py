"""Reads the rows of parquet files."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from recipes.data.documents import Reader
from recipes.data.files import SourceFile

_ROWS = 64
_BUFFER_BYTES = 1 << 20


def read_parquet(
    files: Sequence[SourceFile], fields: Sequence[str], reader: Reader
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The given fields of the files' rows, and where each row is.

    Args:
        files: The files.
        fields: Columns that are read where a file has them.
        reader: Takes what cannot be used: files that are broken or have none of the columns.

    Raises:
        ValueError: If a file cannot be read, or cannot be used and such are not left out, or `pyarrow` is not
            installed.
    """
    for file in files:
        # What goes wrong where the rows are used must not be taken for a fault of the file.
        rows = _rows(file, fields, reader)
        while True:
            try:
                row = next(rows, None)
            except _pyarrow().ArrowException as error:
                reader.problems.add(repr(file.path), f"a broken parquet file ({_first_line(error)})")
                break
            except OSError as error:
                # pyarrow says so of pages that end too early, without an error number.
                if error.errno is not None:
                    raise ValueError(f"cannot read {file.path!r} (data source): {error.strerror}") from error
                reader.problems.add(repr(file.path), f"a broken parquet file ({_first_line(error)})")
                break
            if row is None:
                break
            yield row


def _rows(file: SourceFile, fields: Sequence[str], reader: Reader) -> Iterator[tuple[str, dict[str, Any]]]:
    with _pyarrow("parquet").ParquetFile(file.path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as opened:
        num_rows, columns = opened.metadata.num_rows, opened.schema_arrow.names
        wanted = [field for field in fields if field in columns]
        if num_rows == 0:
            reader.problems.add(repr(file.path), "no rows")
            return
        if not wanted:
            names = ", ".join(map(repr, columns[:8]))
            reader.problems.add(repr(file.path), f"no column {' or '.join(map(repr, fields))} (it has {names})")
            return
        number = 0
        for batch in opened.iter_batches(batch_size=_ROWS, columns=wanted, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield f"{file.path!r}, row {number}", row
            reader.advance(file.num_bytes * number // num_rows - file.num_bytes * (number - batch.num_rows) // num_rows)


def _pyarrow(name: str = "lib") -> Any:
    """A module of pyarrow, which only sources of parquet need."""
    try:
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError as error:
        raise ValueError("reading parquet needs the package pyarrow; pip install 'meshwright[recipes]'") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
