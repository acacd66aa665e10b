"""What the simplest models would lose on a text, to judge a loss by."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.data.packing import PackedDataset
from recipes.data.tokenizer import ByteTokenizer

_PIECE = 1 << 20


class TextEntropy(NamedTuple):
    """Entropies of the labels of a text, in nats a token; a byte is a token, and so is the end of a document.

    Attributes:
        unigram: Of a token by itself: the loss of a model that knows nothing but frequencies.
        bigram: Of a token given the one before it: the loss of a model that sees one token back.
    """

    unigram: float
    bigram: float


def text_entropy(dataset: PackedDataset) -> TextEntropy:
    """Unigram and bigram entropy of a dataset's own text, over the very labels that enter the loss.

    Args:
        dataset: The text.
    """
    size = ByteTokenizer.vocab_size
    counts = np.zeros(size * size, dtype=np.int64)
    # In pieces, so that the peak memory of a run is not that of this count.
    for start in range(0, dataset.num_tokens - 1, _PIECE):
        piece = dataset.tokens[start : start + _PIECE + 1].astype(np.int64)
        pairs = piece[:-1] * size + piece[1:]
        counts += np.bincount(pairs[piece[1:] != ByteTokenizer.bos], minlength=size * size)
    # H(next | previous) = H(previous, next) - H(previous)
    return TextEntropy(
        unigram=_entropy(counts.reshape(size, size).sum(axis=0)),
        bigram=_entropy(counts) - _entropy(counts.reshape(size, size).sum(axis=1)),
    )


def _entropy(counts: NDArray[np.int64]) -> float:
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())
