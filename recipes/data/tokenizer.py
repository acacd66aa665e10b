"""Text as bytes, with four tokens more for borders."""

from collections.abc import Iterable
from typing import ClassVar


class ByteTokenizer:
    """One token a byte of UTF-8, so that any text or binary file is legal and nothing has to be learned.

    Attributes:
        bos: Token before the first byte of a document.
        eos: Token after its last byte.
        pad: Token of positions that hold no text.
        vocab_size: 256 bytes, bos, eos, pad and a spare one, which makes it divisible by 4.
    """

    bos: ClassVar[int] = 256
    eos: ClassVar[int] = 257
    pad: ClassVar[int] = 258
    vocab_size: ClassVar[int] = 260

    def encode(self, text: str | bytes) -> list[int]:
        """The tokens of a text, without bos and eos.

        Args:
            text: Text, or the bytes of one.
        """
        # A command line with bytes that are no UTF-8 reaches Python as surrogates; this gives the bytes back.
        return list(text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; those that are no byte have none, broken UTF-8 shows as U+FFFD.

        Args:
            tokens: Token ids.
        """
        return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", errors="replace")
