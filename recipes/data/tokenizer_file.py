"""The tokens of a `tokenizer.json`, as Hugging Face writes it."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recipes.data.config import TokenizerConfig

if TYPE_CHECKING:
    import tokenizers

# Names that published tokenizers give to these tokens, for files with no tokenizer_config.json beside them.
_BOS = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]")
_EOS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")


class FileTokenizer:
    """The tokens of a `tokenizer.json`.

    Text is plain text: what looks like a special token in it is none, so that data cannot end a document or speak as
    somebody else. Truncation, padding and added tokens that the file asks for are left out.

    Attributes:
        bos: Token before a document, None where documents have none.
        eos: Token after a document.
        pad: Token of positions that hold no text: eos.
        vocab_size: One more than the largest token.
        takes_any_bytes: It takes UTF-8 only.
    """

    takes_any_bytes = False

    def __init__(self, config: TokenizerConfig) -> None:
        """Reads the file.

        Args:
            config: Which file, and its bos and eos.

        Raises:
            ValueError: If it cannot be read, bos or eos is not in it, `tokenizers` is not installed.
        """
        path = tokenizer_path(config)
        self._name = str(path)
        self._tokenizer = _read(path)
        tokens = self._tokenizer.get_vocab(with_added_tokens=True)
        self._specials = tokens
        self.vocab_size: int = max(tokens.values(), default=-1) + 1
        named = _named_tokens(path)
        self.eos: int = self._eos(config.eos or named.get("eos_token"), configured=config.eos is not None)
        self.bos: int | None = self._bos(config.bos, named)
        self.pad: int = self.eos

    def encode(self, text: str | bytes) -> list[int]:
        """The tokens of a text, without bos and eos.

        Args:
            text: Text, or its UTF-8.

        Raises:
            ValueError: If it is not UTF-8.
        """
        text = text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text
        try:
            return self.encode_batch([text])[0].tolist()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the text is not UTF-8 ({error.reason}), which the tokenizer {self._name!r} needs"
            ) from error

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        """The tokens of several texts.

        Args:
            texts: UTF-8 of each.

        Raises:
            ValueError: If one is not UTF-8.
        """
        decoded = [text.decode("utf-8") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; special ones, and those that the file does not know, have none.

        Args:
            tokens: Token ids.
        """
        return self._tokenizer.decode([token for token in tokens if token >= 0], skip_special_tokens=True)

    def special(self, name: str) -> int:
        """The token of that name.

        Args:
            name: As the file writes it.

        Raises:
            ValueError: If there is none.
        """
        if name not in self._specials:
            raise ValueError(f"the tokenizer {self._name!r} has no token {name!r}")
        return self._specials[name]

    def _eos(self, name: str | None, *, configured: bool) -> int:
        if name is None:
            name = next((each for each in _EOS if each in self._specials), None)
        if name is None:
            raise ValueError(
                f"the tokenizer {self._name!r} does not say which token ends a document (no tokenizer_config.json "
                f"beside it, none of {' '.join(_EOS)} in it); name it with tokenizer eos"
            )
        if name not in self._specials:
            where = "given as tokenizer eos" if configured else "that tokenizer_config.json names as eos_token"
            raise ValueError(f"the tokenizer {self._name!r} has no token {name!r}, {where}")
        return self._specials[name]

    def _bos(self, configured: str | None, named: dict[str, str | None]) -> int | None:
        if configured is not None:
            return self.special(configured) if configured else None
        if "bos_token" in named:
            name = named["bos_token"]
        else:
            name = next((each for each in _BOS if each in self._specials), None)
        bos = None if name is None else self.special(name)
        return None if bos == self.eos else bos


def tokenizer_path(config: TokenizerConfig) -> Path:
    """Where the file of a config is.

    Args:
        config: It names the file or its folder.

    Raises:
        ValueError: If there is no such file.
    """
    path = Path(os.path.expanduser(config.file or ""))
    if os.path.isdir(path):
        path /= "tokenizer.json"
    if not os.path.isfile(path):
        raise ValueError(f"there is no tokenizer file {str(path)!r}; give a tokenizer.json or a folder that holds one")
    return path


def tokenizer_identity(config: TokenizerConfig) -> str:
    """What tells apart two tokenizers that give other tokens; cheap, and without `tokenizers`.

    Args:
        config: The tokenizer.

    Raises:
        ValueError: If there is no such file.
    """
    if config.file is None:
        return "bytes"
    path = tokenizer_path(config)
    digest = hashlib.blake2b(json.dumps([config.bos, config.eos, _named_tokens(path)]).encode(), digest_size=16)
    digest.update(_bytes_of(path))
    return digest.hexdigest()


def _read(path: Path) -> "tokenizers.Tokenizer":
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            "reading a tokenizer.json needs the package tokenizers; pip install 'meshwright[recipes]'"
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(_bytes_of(path))
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"cannot read {str(path)!r}: not a tokenizer.json of Hugging Face ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror}") from error


def _named_tokens(path: Path) -> dict[str, str | None]:
    """What `tokenizer_config.json` beside the file says of bos and eos: a name, or None for no such token."""
    beside = path.with_name("tokenizer_config.json")
    if not beside.is_file():
        return {}
    try:
        values: Any = json.loads(_bytes_of(beside))
    except ValueError as error:
        raise ValueError(f"cannot read {str(beside)!r}: not JSON ({error})") from error
    named: dict[str, str | None] = {}
    for key in ("bos_token", "eos_token"):
        value = values.get(key) if isinstance(values, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) or (isinstance(values, dict) and key in values):
            named[key] = value if isinstance(value, str) else None
    return named
