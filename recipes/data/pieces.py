"""Cuts long texts where their tokens do not change, so that no text has to be held as a whole."""

from collections.abc import Iterable, Iterator

PIECE_BYTES = 1 << 15
"""Bytes of the longest piece."""

_CONTINUATION = range(0x80, 0xC0)


def pieces(blocks: Iterable[bytes], piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The same text in pieces; UTF-8 stays whole.

    A cut falls after a line break if there is one in the second half of a piece, or else before a space. Tokenizers
    that split text into words first give the same tokens; those that put a mark before a text, such as those of
    sentencepiece, put one more at each cut.

    Args:
        blocks: The text, in any blocks.
        piece_bytes: Bytes of the longest piece.
    """
    rest = b""
    for block in blocks:
        rest += block
        start = 0
        while len(rest) - start > piece_bytes:
            end = _cut(rest, start, start + piece_bytes)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


def _cut(text: bytes, start: int, limit: int) -> int:
    middle = max(start + 1, (start + limit) // 2)
    position = limit
    while (position := text.rfind(b"\n", middle, position)) >= 0:
        # White space on either side would be split otherwise than it is now.
        if not text[position - 1 : position].isspace() and not text[position + 1 : position + 2].isspace():
            return position + 1
    position = limit
    while (position := text.rfind(b" ", middle, position)) >= 0:
        if not text[position - 1 : position].isspace():
            return position
    return character_border(text, limit, floor=start + 1)


def character_border(text: bytes, position: int, *, floor: int = 0) -> int:
    """The last position up to `position` at which no character of UTF-8 is cut through.

    Args:
        text: UTF-8, or any bytes: a character has at most 4.
        position: Where to look from, less than the length.
        floor: Not before this.
    """
    for border in range(position, max(position - 4, floor - 1), -1):
        if text[border] not in _CONTINUATION:
            return border
    return position
