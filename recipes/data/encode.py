"""Documents to files of tokens, a few megabytes at a time."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.data.documents import Document
from recipes.data.pieces import PIECE_BYTES, pieces
from recipes.data.store import StoreWriter
from recipes.data.tokenizer import Tokenizer

SIDES = ("train", "held_out")

# Enough for a tokenizer to use every core, and little beside the rest of a run.
_BATCH_BYTES = 1 << 20
_BATCH_ITEMS = 1 << 14


class _Item(NamedTuple):
    held_out: bool
    opens: bool
    content: bytes | int
    learned: bool


def write_tokens(
    documents: Iterable[Document], tokenizer: Tokenizer, folder: Path, *, chooses: bool
) -> dict[str, dict[str, Any]]:
    """Writes the tokens of documents into a folder.

    Args:
        documents: What to write, in order.
        tokenizer: What gives the tokens.
        folder: Where to; it must exist.
        chooses: Whether documents say which of their tokens are predicted.

    Returns:
        For each side, `train` and `held_out`, what `open_store` must be told.

    Raises:
        ValueError: If a document cannot be read.
        OSError: If the files cannot be written.
    """
    with ExitStack() as stack:
        train, held_out = (
            stack.enter_context(StoreWriter(folder, side, tokenizer.vocab_size, chooses=chooses)) for side in SIDES
        )
        items: list[_Item] = []
        num_bytes = 0
        for document in documents:
            for item in _items(document):
                items.append(item)
                num_bytes += len(item.content) if isinstance(item.content, bytes) else 0
                if num_bytes >= _BATCH_BYTES or len(items) >= _BATCH_ITEMS:
                    _flush(items, tokenizer, train, held_out)
                    num_bytes = 0
        _flush(items, tokenizer, train, held_out)
        return dict(zip(SIDES, (train.finish(), held_out.finish()), strict=True))


def _items(document: Document) -> Iterable[_Item]:
    opens = True
    for segment in document.segments:
        short = isinstance(segment.content, int) or len(segment.content) <= PIECE_BYTES
        for content in [segment.content] if short else pieces([segment.content]):  # type: ignore[list-item]
            yield _Item(document.held_out, opens, content, segment.learned)
            opens = False


def _flush(items: list[_Item], tokenizer: Tokenizer, train: StoreWriter, held_out: StoreWriter) -> None:
    encoded = iter(tokenizer.encode_batch([item.content for item in items if isinstance(item.content, bytes)]))
    sides: tuple[list[tuple[_Item, NDArray[np.integer]]], ...] = ([], [])
    for item in items:
        tokens = np.array([item.content]) if isinstance(item.content, int) else next(encoded)
        sides[item.held_out].append((item, tokens))
    items.clear()
    for writer, side in zip((train, held_out), sides, strict=True):
        if not side:
            continue
        lengths = np.array([len(tokens) for _, tokens in side])
        opens = np.array([item.opens for item, _ in side])
        learned = np.array([item.learned for item, _ in side])
        writer.add(
            np.concatenate([tokens for _, tokens in side], dtype=writer.dtype, casting="unsafe"),
            (lengths.cumsum() - lengths)[opens],
            learned.repeat(lengths),
        )
