"""Documents joined to one stream of tokens, cut into samples of equal length."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallel.batch import IGNORE_INDEX
from recipes.checks import check_integer
from recipes.data.order import permutation
from recipes.data.store import TokenStore

# S sequence


class Sample(NamedTuple):
    """One row of a batch; the fields are those of `Batch`, int64 [S] each.

    Attributes:
        tokens: Token ids.
        labels: The token that follows each position, `IGNORE_INDEX` at the end of a document, before a token that is
            not learned, and on padding.
        positions: Position within the part of the document that this sample holds.
        document_ids: Number of the document in the dataset; padding counts as one more.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    document_ids: NDArray[np.int64]


class PackedDataset:
    """The documents of a store, joined in order.

    Documents of text are cut every `sequence_length` tokens. One may go on in the next sample, where its positions
    start from 0 again: they stay below the sequence length, and what attention sees there starts at the cut. Each
    token but the first of a document is the label of exactly one position of one sample. The last sample is padded.

    Chats stay whole, since what a model is to say follows from all that was said before: a sample holds as many as
    fit one after the other, and padding. One that is longer than a sample has one for itself, and loses its end.

    Attributes:
        sequence_length: Tokens of one sample.
        attend_across_documents: Whether the documents that share a sample see each other.
        num_documents: Documents packed.
        num_tokens: Tokens of all documents, bos and eos included, padding not.
        num_samples: Samples.
        num_cut: Chats that lose their end.
        fingerprint: Hash of all tokens.
    """

    def __init__(self, store: TokenStore, *, sequence_length: int, attend_across_documents: bool = False) -> None:
        """Packs the documents.

        Args:
            store: What to pack.
            sequence_length: Tokens of one sample.
            attend_across_documents: Let the documents that share a sample see each other.

        Raises:
            ValueError: If there is no document, or the sequence length is not positive.
        """
        check_integer("sequence_length", sequence_length, minimum=1)
        if store.num_documents == 0:
            raise ValueError("no documents to pack")
        self.store = store
        self.sequence_length = sequence_length
        self.attend_across_documents = attend_across_documents
        self.num_documents = store.num_documents
        self.num_tokens = store.num_tokens
        self.fingerprint = store.fingerprint
        self._borders: NDArray[np.int64] | None = None
        self.num_cut = 0
        if store.learned is None:
            # The last eos is a label only, so it opens no sample.
            self.num_samples = -(-(self.num_tokens - 1) // sequence_length)
        else:
            # The last token of a sample is a label only.
            self._borders = _whole(store.starts, sequence_length + 1)
            self.num_samples = len(self._borders) - 1
            self.num_cut = int((np.diff(store.starts) > sequence_length + 1).sum())

    @property
    def tokens(self) -> NDArray[np.integer]:
        """All tokens in order, padding excluded, [num_tokens]."""
        return self.store.tokens

    def sample(self, index: int) -> Sample:
        """One sample.

        Args:
            index: Its number, from 0 to `num_samples` - 1.

        Raises:
            IndexError: If there is no such sample.
        """
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of a dataset of {self.num_samples}")
        length, store = self.sequence_length, self.store
        start, end = self._extent(index)
        row = np.full(length + 1, store.pad, dtype=np.int64)
        row[: end - start] = store.tokens[start:end]
        where = np.arange(start, start + length + 1)
        documents = store.starts.searchsorted(where, side="right") - 1
        # The padding counts as a document, so that no token of text has a pad within its attention.
        documents[end - start :] = self.num_documents
        starts = np.minimum(store.starts[documents], end)
        first = np.full(1, start) if self.attend_across_documents else np.maximum(starts[:-1], start)
        has_label = (documents[1:] == documents[:-1]) & (where[1:] < end)
        if store.learned is not None:
            has_label[: end - start - 1] &= store.learned[start + 1 : end]
        return Sample(
            tokens=row[:-1],
            labels=np.where(has_label, row[1:], IGNORE_INDEX),
            positions=where[:-1] - first,
            document_ids=documents[:-1],
        )

    def padding(self) -> Sample:
        """A row that does not enter the loss: pads alone."""
        length = self.sequence_length
        return Sample(
            tokens=np.full(length, self.store.pad, dtype=np.int64),
            labels=np.full(length, IGNORE_INDEX, dtype=np.int64),
            positions=np.arange(length, dtype=np.int64),
            document_ids=np.full(length, self.num_documents, dtype=np.int64),
        )

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """All samples, shuffled.

        Args:
            seed: Seed of the run.
            epoch: Number of the epoch.
        """
        return permutation(self.num_samples, seed, epoch)

    def _extent(self, index: int) -> tuple[int, int]:
        """Where a sample starts in the stream, and where the last of its labels ends."""
        if self._borders is None:
            start, limit = index * self.sequence_length, self.num_tokens
        else:
            start, limit = int(self._borders[index]), int(self._borders[index + 1])
        return start, min(start + self.sequence_length + 1, limit)


def _whole(starts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Where samples of whole documents start in the stream, and where the last one ends."""
    borders, document, num_documents = [0], 0, len(starts) - 1
    starts = np.asarray(starts)
    while document < num_documents:
        fitting = int(starts.searchsorted(starts[document] + most, side="right")) - 1
        document = max(fitting, document + 1)
        borders.append(int(starts[document]))
    return np.array(borders, dtype=np.int64)
