"""Reads files of text, each of which is a document."""

import codecs
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence

from recipes.data.documents import Document, Reader, Segment
from recipes.data.files import SourceFile
from recipes.data.pieces import character_border, pieces

_BLOCK_BYTES = 1 << 20


def read_text_files(files: Sequence[SourceFile], held_out_fraction: float, reader: Reader) -> Iterator[Document]:
    """The documents of text files, in the files' order; files without text are left out.

    Where there are files to choose from, at least one is trained on and at least one held out; of a single file the
    last bytes are held out.

    Args:
        files: The files.
        held_out_fraction: Share of them that is held out.
        reader: What they are read for.

    Raises:
        ValueError: If one cannot be read, or used.
    """
    files = [file for file in files if _is_usable(file, reader)]
    if len(files) == 1 and held_out_fraction > 0:
        yield from _split_file(files[0], held_out_fraction, reader)
        return
    held_out = _held_out_names([file.name for file in files], held_out_fraction) if held_out_fraction > 0 else set()
    for file in files:
        yield _document(file, reader, 0, file.num_bytes, held_out=file.name in held_out)


def _is_usable(file: SourceFile, reader: Reader) -> bool:
    """Whether a file holds text; where the tokenizer takes UTF-8 only, one that is not is a problem."""
    if reader.tokenizer.takes_any_bytes:
        has_text = any(block.strip() for block in _blocks(file, 0, file.num_bytes))
    else:
        has_text, broken_line = _read_unicode(file)
        if broken_line is not None:
            reader.problems.add(f"{file.path!r}, line {broken_line}", "not UTF-8 text")
            return False
    reader.problems.num_empty += not has_text
    return has_text


def _read_unicode(file: SourceFile) -> tuple[bool, int | None]:
    """Whether a file holds text, and its first line that is not UTF-8, counted from 1."""
    has_text, num_lines = False, 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in itertools.chain(_blocks(file, 0, file.num_bytes), [b""]):
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # It had up to 3 bytes of the block before, which hold no line break.
            return has_text, num_lines + error.object[: error.start].count(b"\n") + 1
        num_lines += block.count(b"\n")
        has_text = has_text or bool(block.strip())
    return has_text, None


def _split_file(file: SourceFile, fraction: float, reader: Reader) -> Iterator[Document]:
    cut = file.num_bytes - max(1, round(file.num_bytes * fraction))
    if not reader.tokenizer.takes_any_bytes:
        first = max(0, cut - 3)
        cut = first + character_border(b"".join(_blocks(file, first, cut + 1)), cut - first)
    yield _document(file, reader, 0, cut, held_out=False)
    yield _document(file, reader, cut, file.num_bytes, held_out=True)


def _document(file: SourceFile, reader: Reader, start: int, end: int, *, held_out: bool) -> Document:
    def segments() -> Iterator[Segment]:
        if reader.tokenizer.bos is not None:
            yield Segment(reader.tokenizer.bos)
        for piece in pieces(_blocks(file, start, end)):
            yield Segment(piece)
            reader.advance(len(piece))
        yield Segment(reader.tokenizer.eos)

    return Document(name=file.name, segments=segments(), held_out=held_out)


def _blocks(file: SourceFile, start: int, end: int) -> Iterator[bytes]:
    try:
        with open(file.path, "rb") as opened:
            opened.seek(start)
            while start < end and (block := opened.read(min(_BLOCK_BYTES, end - start))):
                start += len(block)
                yield block
    except OSError as error:
        raise ValueError(f"cannot read {file.path!r} (data source): {error.strerror}") from error


def _held_out_names(names: Sequence[str], fraction: float) -> set[str]:
    """By a hash of the name, so that a file stays on its side when others come or go."""
    by_hash = sorted(names, key=_name_hash)
    num_held_out = sum(_name_hash(name) < fraction for name in by_hash)
    num_held_out = min(max(num_held_out, 1), len(by_hash) - 1)
    return set(by_hash[:num_held_out])


def _name_hash(name: str) -> float:
    """A number in [0, 1) that depends on the name only."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
