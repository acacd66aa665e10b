"""Documents joined to one stream of tokens, cut into samples of equal length."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from parallel.batch import IGNORE_INDEX, Batch
from recipes.checks import check_integer
from recipes.data.documents import Document
from recipes.data.tokenizer import ByteTokenizer

# B batch, S sequence


class Sample(NamedTuple):
    """One row of a batch; the fields are those of `Batch`, int64 [S] each.

    Attributes:
        tokens: Token ids.
        labels: The token that follows each position, `IGNORE_INDEX` at the end of a document and on padding.
        positions: Position within the part of the document that this sample holds.
        document_ids: Number of the document in the dataset; padding counts as one more.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    document_ids: NDArray[np.int64]


class PackedDataset:
    """Documents as bos, bytes, eos, joined in order and cut every `sequence_length` tokens.

    A document may go on in the next sample, where its positions start from 0 again: they stay below the sequence
    length, and what attention sees there starts at the cut. Each token but a bos is the label of exactly one position
    of one sample. The last sample is padded.

    Attributes:
        sequence_length: Tokens of one sample.
        attend_across_documents: Whether the documents that share a sample see each other.
        num_documents: Documents packed.
        num_tokens: Tokens of all documents, bos and eos included, padding not.
        num_samples: Samples.
        fingerprint: Hash of all tokens.
    """

    def __init__(
        self, documents: Sequence[Document], *, sequence_length: int, attend_across_documents: bool = False
    ) -> None:
        """Packs the documents.

        Args:
            documents: What to pack, in order.
            sequence_length: Tokens of one sample.
            attend_across_documents: Let the documents that share a sample see each other.

        Raises:
            ValueError: If there is no document, or the sequence length is not positive.
        """
        check_integer("sequence_length", sequence_length, minimum=1)
        if not documents:
            raise ValueError("no documents to pack")
        self.sequence_length = sequence_length
        self.attend_across_documents = attend_across_documents
        self.num_documents = len(documents)
        lengths = np.array([len(document.text) + 2 for document in documents], dtype=np.int64)
        self.num_tokens = int(lengths.sum())
        # The last eos is a label only, so it opens no sample.
        self.num_samples = -(-(self.num_tokens - 1) // sequence_length)
        # The padding counts as a document, so that no token of text has a pad within its attention.
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum()])
        self._stream = np.full(self.num_samples * sequence_length + 1, ByteTokenizer.pad, dtype=np.uint16)
        for document, start in zip(documents, self._starts.tolist(), strict=False):
            end = start + 1 + len(document.text)
            self._stream[start] = ByteTokenizer.bos
            self._stream[start + 1 : end] = np.frombuffer(document.text, dtype=np.uint8)
            self._stream[end] = ByteTokenizer.eos
        self.fingerprint = hashlib.blake2b(self.tokens.astype("<u2", copy=False).data, digest_size=16).hexdigest()

    @property
    def tokens(self) -> NDArray[np.uint16]:
        """All tokens in order, padding excluded, uint16 [num_tokens]."""
        return self._stream[: self.num_tokens]

    def sample(self, index: int) -> Sample:
        """One sample.

        Args:
            index: Its number, from 0 to `num_samples` - 1.

        Raises:
            IndexError: If there is no such sample.
        """
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of a dataset of {self.num_samples}")
        start = index * self.sequence_length
        row = self._stream[start : start + self.sequence_length + 1].astype(np.int64)
        following = row[1:]
        no_label = (following == ByteTokenizer.bos) | (following == ByteTokenizer.pad)
        where = np.arange(start, start + self.sequence_length)
        document_ids = self._starts.searchsorted(where, side="right") - 1
        first = np.full(1, start) if self.attend_across_documents else np.maximum(self._starts[document_ids], start)
        return Sample(
            tokens=row[:-1],
            labels=np.where(no_label, IGNORE_INDEX, following),
            positions=where - first,
            document_ids=document_ids,
        )

    def padding(self) -> Sample:
        """A row that does not enter the loss: pads alone."""
        length = self.sequence_length
        return Sample(
            tokens=np.full(length, ByteTokenizer.pad, dtype=np.int64),
            labels=np.full(length, IGNORE_INDEX, dtype=np.int64),
            positions=np.arange(length, dtype=np.int64),
            document_ids=np.full(length, self.num_documents, dtype=np.int64),
        )


def collate(dataset: PackedDataset, sample_ids: Sequence[int], num_rows: int) -> Batch:
    """A batch of the given samples, filled up with rows that do not enter the loss.

    Args:
        dataset: Where the samples are.
        sample_ids: Which ones, at most `num_rows`.
        num_rows: Rows of the batch.

    Returns:
        A batch of `num_rows` rows; without document ids where documents may see each other.
    """
    rows = [dataset.sample(index) for index in sample_ids]
    rows += [dataset.padding()] * (num_rows - len(rows))
    tokens, labels, positions, document_ids = (torch.from_numpy(np.stack(field)) for field in zip(*rows, strict=True))
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=positions,
        document_ids=None if dataset.attend_across_documents else document_ids,
    )
