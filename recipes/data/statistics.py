"""What the simplest models would lose on a text, to judge a loss by."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.data.mixture import Dataset, MixedDataset
from recipes.data.packing import PackedDataset

_PIECE = 1 << 20
_MOST_TOKENS = 1 << 10


class TextEntropy(NamedTuple):
    """Entropies of the labels of a text, in nats a token; a byte is a token, and so is the end of a document.

    Attributes:
        unigram: Of a token by itself: the loss of a model that knows nothing but frequencies.
        bigram: Of a token given the one before it: the loss of a model that sees one token back.
    """

    unigram: float
    bigram: float


def text_entropy(dataset: Dataset) -> TextEntropy:
    """Unigram and bigram entropy of a dataset's own text, over the very labels that enter the loss.

    Args:
        dataset: The text, of one source, with a small vocabulary such as that of bytes.

    Raises:
        ValueError: If it is a mixture, or its vocabulary is large: few of the pairs of its tokens would ever come
            twice, so that their entropy says nothing.
    """
    if isinstance(dataset, MixedDataset):
        raise ValueError("the entropy of a text needs a single source, not a mixture")
    size = dataset.store.vocab_size
    if size > _MOST_TOKENS:
        raise ValueError(
            f"the entropy of a text needs at most {_MOST_TOKENS} kinds of tokens, such as bytes; got {size}"
        )
    counts = np.zeros(size * size, dtype=np.int64)
    # In pieces, so that the peak memory of a run is not that of this count.
    for start in range(0, dataset.num_tokens - 1, _PIECE):
        piece = dataset.tokens[start : start + _PIECE + 1].astype(np.int64)
        pairs = piece[:-1] * size + piece[1:]
        counts += np.bincount(pairs[_is_label(dataset, start + 1, len(pairs))], minlength=size * size)
    # H(next | previous) = H(previous, next) - H(previous)
    return TextEntropy(
        unigram=_entropy(counts.reshape(size, size).sum(axis=0)),
        bigram=_entropy(counts) - _entropy(counts.reshape(size, size).sum(axis=1)),
    )


def _is_label(dataset: PackedDataset, start: int, num: int) -> NDArray[np.bool_]:
    """Which of some tokens are predicted."""
    starts, learned = dataset.store.starts, dataset.store.learned
    is_label = np.ones(num, dtype=bool) if learned is None else learned[start : start + num].copy()
    first, last = starts.searchsorted([start, start + num])
    is_label[starts[first:last] - start] = False
    return is_label


def _entropy(counts: NDArray[np.int64]) -> float:
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())
