"""Turns the records of JSONL and parquet into documents, and holds some of them out."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from recipes.data.chat import TEMPLATES, read_messages, render
from recipes.data.config import SourceConfig
from recipes.data.documents import Document, Reader, Segment, UnusableError
from recipes.data.tokenizer import Tokenizer

_HASH_BYTES = 6
_HASHES = 1 << 8 * _HASH_BYTES


class RecordSplit:
    """Which records are held out: those whose content has a hash below a threshold."""

    def __init__(self, fraction: float, threshold: int | None = None) -> None:
        """Starts before the first record.

        Args:
            fraction: Share to hold out.
            threshold: Hash below which a record is held out; None takes the fraction of all hashes.
        """
        self._fraction = fraction
        self._threshold = round(fraction * _HASHES) if threshold is None else threshold
        self._lowest, self._highest = _HASHES, -1

    def holds_out(self, content: bytes) -> bool:
        """Whether a record is held out.

        Args:
            content: What it holds.
        """
        hashed = int.from_bytes(hashlib.blake2b(content, digest_size=_HASH_BYTES).digest(), "big")
        self._lowest, self._highest = min(self._lowest, hashed), max(self._highest, hashed)
        return hashed < self._threshold

    def corrected(self) -> "RecordSplit | None":
        """The split to use instead where one side got none of the records seen; None if this one is good.

        Raises:
            ValueError: If the records seen are all the same, so that none can be held out.
        """
        if self._fraction == 0 or self._highest < 0 or self._lowest < self._threshold <= self._highest:
            return None
        if self._lowest == self._highest:
            raise ValueError(
                f"held_out_fraction={self._fraction} needs two different records, one to train on and one to hold "
                "out; give more, or hold out 0"
            )
        none_held_out = self._lowest >= self._threshold
        return RecordSplit(self._fraction, self._lowest + 1 if none_held_out else self._highest)


def record_fields(source: SourceConfig) -> tuple[str, ...]:
    """The fields of a record that are read, where it has them.

    Args:
        source: How records are read.
    """
    return ("messages", "prompt", "completion") if source.record == "chat" else (source.text_field,)


def record_documents(
    records: Iterable[tuple[str, Mapping[str, Any]]], source: SourceConfig, split: RecordSplit, reader: Reader
) -> Iterator[Document]:
    """The documents of some records.

    Args:
        records: Where each is, and its fields.
        source: How they are read.
        split: Which are held out.
        reader: What they are read for.

    Raises:
        ValueError: If one cannot be used, and such are not left out.
    """
    for where, record in records:
        try:
            if source.record == "chat":
                content, segments = _chat(record, source.chat_template, reader.tokenizer)
            else:
                content, segments = _text(record, source.text_field, reader.tokenizer)
            if len(content) > reader.max_record_bytes:
                raise UnusableError(f"longer than max_record_bytes={reader.max_record_bytes}")
        except UnusableError as error:
            reader.problems.add(where, str(error))
            continue
        yield Document(name=where, segments=segments, held_out=split.holds_out(content))


def _text(record: Mapping[str, Any], field: str, tokenizer: Tokenizer) -> tuple[bytes, list[Segment]]:
    text = text_of(record, field)
    if not text.strip():
        raise UnusableError(f"no text in its field {field!r}")
    start = [] if tokenizer.bos is None else [Segment(tokenizer.bos)]
    return text, [*start, Segment(text), Segment(tokenizer.eos)]


def _chat(record: Mapping[str, Any], template: str, tokenizer: Tokenizer) -> tuple[bytes, list[Segment]]:
    if record.get("messages") is not None:
        messages = read_messages(record["messages"])
        segments = render(messages, TEMPLATES[template], tokenizer)
        content = b"\0".join(part for message in messages for part in (message.role.encode(), message.content))
    elif record.get("prompt") is not None or record.get("completion") is not None:
        prompt, completion = text_of(record, "prompt"), text_of(record, "completion")
        if not completion.strip():
            raise UnusableError("no text in its field 'completion'")
        segments = [Segment(prompt, learned=False), Segment(completion), Segment(tokenizer.eos)]
        if tokenizer.bos is not None:
            segments.insert(0, Segment(tokenizer.bos, learned=False))
        content = prompt + b"\0" + completion
    else:
        raise UnusableError(f"neither 'messages' nor 'prompt' and 'completion' ({_fields(record)})")
    return content, segments


def text_of(record: Mapping[str, Any], field: str) -> bytes:
    """A field's text, as UTF-8.

    Args:
        record: What has the field.
        field: Its name.

    Raises:
        UnusableError: If there is no such field, or it holds something else.
    """
    if field not in record:
        raise UnusableError(f"no field {field!r} ({_fields(record)})")
    value = record[field]
    if not isinstance(value, str):
        raise UnusableError(f"its field {field!r} is no text but {type(value).__name__}")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableError(f"its field {field!r} is no Unicode text ({error.reason})") from error


def _fields(record: Mapping[str, Any]) -> str:
    names = ", ".join(repr(str(name)) for name in list(record)[:8])
    return f"it has {names}" if names else "it is empty"
