"""Text as tokens: the bytes themselves, or those of a `tokenizer.json`."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.data.config import DataConfig, TokenizerConfig
from recipes.data.tokenizer_file import FileTokenizer


class ByteTokenizer:
    """One token a byte of UTF-8, so that any text or binary file is legal and nothing has to be learned.

    Attributes:
        bos: Token before the first byte of a document.
        eos: Token after its last byte.
        pad: Token of positions that hold no text.
        vocab_size: 256 bytes, bos, eos, pad and a spare one, which makes it divisible by 4.
        takes_any_bytes: It does.
    """

    bos: ClassVar[int] = 256
    eos: ClassVar[int] = 257
    pad: ClassVar[int] = 258
    vocab_size: ClassVar[int] = 260
    takes_any_bytes: ClassVar[bool] = True

    def encode(self, text: str | bytes) -> list[int]:
        """The tokens of a text, without bos and eos.

        Args:
            text: Text, or the bytes of one.
        """
        # A command line with bytes that are no UTF-8 reaches Python as surrogates; this gives the bytes back.
        return list(text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text)

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        """The tokens of several texts.

        Args:
            texts: The bytes of each.
        """
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; those that are no byte have none, broken UTF-8 shows as U+FFFD.

        Args:
            tokens: Token ids.
        """
        return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", errors="replace")

    def special(self, name: str) -> int:
        """Refuses: bytes have no special tokens with names.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"bytes have no token {name!r}; use a tokenizer file that has it")


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer
"""What turns text into tokens and back."""


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a config.

    Args:
        config: Bytes, or which file.

    Raises:
        ValueError: If the file cannot be used, or `tokenizers` is not installed.
    """
    return ByteTokenizer() if config.file is None else FileTokenizer(config)


def check_vocabulary(config: DataConfig, num_embeddings: int) -> None:
    """Refuses a model that has no embedding for some token of the data.

    Args:
        config: The data, with its tokenizer.
        num_embeddings: Size of the model's vocabulary.

    Raises:
        ValueError: If the model's vocabulary is smaller than the tokenizer's, or the tokenizer cannot be used.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if num_embeddings < tokenizer.vocab_size:
        name = "bytes" if config.tokenizer.file is None else repr(config.tokenizer.file)
        raise ValueError(
            f"the model's vocab_size={num_embeddings} must be at least the {tokenizer.vocab_size} tokens of the data's "
            f"tokenizer ({name}); set vocab_size to that or more"
        )


def prompt_tokens(tokenizer: Tokenizer, text: str | bytes) -> list[int]:
    """The tokens after which a model goes on with a text, as it learned documents: never none.

    Args:
        tokenizer: That of the model.
        text: How the document begins.
    """
    tokens = [] if tokenizer.bos is None else [tokenizer.bos]
    # Without bos a document follows the end of another.
    return tokens + tokenizer.encode(text) or [tokenizer.eos]
