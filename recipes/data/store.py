"""The tokens of one side of a source, as files that are mapped into memory."""

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenStore(NamedTuple):
    """Documents as one stream of tokens, bos and eos included.

    Attributes:
        tokens: All tokens in order, uint16 or uint32 [num_tokens].
        starts: Where each document starts, and where the last one ends, int64 [num_documents + 1].
        learned: Which tokens are predicted, bool [num_tokens]; None: all but the first of each document. Documents
            with such a choice are chats, which are packed whole.
        pad: Token of positions that hold no text.
        vocab_size: One more than the largest token of the tokenizer.
        fingerprint: Hash of all of this.
    """

    tokens: NDArray[np.integer]
    starts: NDArray[np.int64]
    learned: NDArray[np.bool_] | None
    pad: int
    vocab_size: int
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents."""
        return len(self.starts) - 1


class StoreWriter:
    """Writes the files of a store, piece by piece."""

    def __init__(self, folder: Path, name: str, vocab_size: int, *, chooses: bool) -> None:
        """Creates the files.

        Args:
            folder: Where.
            name: How their names begin.
            vocab_size: One more than the largest token.
            chooses: Whether it is said of each token if it is predicted.
        """
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._tokens = _HashedFile(folder / f"{name}.tokens")
        self._starts = _HashedFile(folder / f"{name}.starts")
        self._learned = _HashedFile(folder / f"{name}.learned") if chooses else None
        self.num_tokens = self.num_documents = 0

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close(keep=kind is None)

    def add(self, tokens: NDArray[np.integer], starts: NDArray[np.int64], learned: NDArray[np.bool_]) -> None:
        """Appends tokens.

        Args:
            tokens: What to append.
            starts: Where among them documents start.
            learned: Which of them are predicted.
        """
        self._starts.write((starts + self.num_tokens).astype("<i8"))
        self._tokens.write(tokens.astype(self.dtype, copy=False))
        if self._learned is not None:
            self._learned.write(learned)
        self.num_tokens += len(tokens)
        self.num_documents += len(starts)

    def finish(self) -> dict[str, Any]:
        """Completes the files.

        Returns:
            What `open_store` must be told of them, as JSON can hold it.
        """
        self._starts.write(np.array([self.num_tokens], dtype="<i8"))
        digests = [file.digest() for file in self._files]
        if self._learned is None:
            # The tokens say it all: where documents start as well.
            fingerprint = digests[0]
        else:
            fingerprint = hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()
        return {
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "dtype": self.dtype.str,
            "chooses": self._learned is not None,
            "fingerprint": fingerprint,
        }

    @property
    def _files(self) -> list["_HashedFile"]:
        return [self._tokens, self._starts, *([] if self._learned is None else [self._learned])]


def open_store(folder: Path, name: str, told: dict[str, Any], *, pad: int, vocab_size: int) -> TokenStore:
    """Maps the files of a store into memory.

    Args:
        folder: Where they are.
        name: How their names begin.
        told: What `StoreWriter.finish` gave.
        pad: Token of positions that hold no text.
        vocab_size: One more than the largest token of the tokenizer.

    Raises:
        OSError: If a file is missing.
        ValueError: If a file has not the size that it should have.
        KeyError: If `told` lacks something.
    """
    num_tokens = told["num_tokens"]
    return TokenStore(
        tokens=_mapped(folder / f"{name}.tokens", np.dtype(told["dtype"]), num_tokens),
        starts=_mapped(folder / f"{name}.starts", np.dtype("<i8"), told["num_documents"] + 1),
        learned=_mapped(folder / f"{name}.learned", np.dtype("?"), num_tokens) if told["chooses"] else None,
        pad=pad,
        vocab_size=vocab_size,
        fingerprint=told["fingerprint"],
    )


class _HashedFile:
    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._hash = hashlib.blake2b(digest_size=16)

    def write(self, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values).view(np.uint8).data
        self._hash.update(data)
        self._file.write(data)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def close(self, *, keep: bool) -> None:
        if keep:
            self._file.flush()
            # A power cut must not leave a file of the right size without its contents.
            os.fsync(self._file.fileno())
        self._file.close()


def _mapped(path: Path, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
    num_bytes = path.stat().st_size
    if num_bytes != length * dtype.itemsize:
        raise ValueError(f"{str(path)!r} has {num_bytes} bytes instead of {length * dtype.itemsize}")
    if length == 0:
        # An empty file cannot be mapped.
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,))
