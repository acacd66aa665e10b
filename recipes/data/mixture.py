"""Several datasets as one, mixed by weight.

An epoch takes as many samples as the datasets hold together, shared out by weight to the sample (largest remainders
first), in an order of its own. Each dataset is gone through in its own shuffled passes, one after the other across
epochs: with a small weight it goes on in the next epoch where it stopped in this one, with a large one it begins
again within the epoch. None of its samples comes again before all the others have come.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.data.order import permutation
from recipes.data.packing import PackedDataset, Sample


class MixedDataset:
    """Several datasets, whose samples are numbered one dataset after the other.

    Attributes:
        parts: The datasets.
        num_of_epoch: Samples that an epoch takes of each.
        sequence_length: Tokens of one sample.
        attend_across_documents: Whether the documents that share a sample see each other.
        num_documents: Documents of all parts.
        num_tokens: Tokens of all parts.
        num_samples: Samples of all parts, which is also how many an epoch takes.
        fingerprint: Hash of those of the parts, and of how they are mixed.
    """

    def __init__(self, parts: Sequence[PackedDataset], weights: Sequence[float]) -> None:
        """Mixes datasets.

        Args:
            parts: The datasets, cut in the same way.
            weights: Share of each, relative to the others.

        Raises:
            ValueError: If the parts differ in how they are cut, or a share is less than a sample an epoch.
        """
        if len({(part.sequence_length, part.attend_across_documents) for part in parts}) != 1:
            raise ValueError("datasets that are mixed must have one sequence_length and one attend_across_documents")
        self.parts = tuple(parts)
        self.sequence_length = parts[0].sequence_length
        self.attend_across_documents = parts[0].attend_across_documents
        self.num_documents = sum(part.num_documents for part in parts)
        self.num_tokens = sum(part.num_tokens for part in parts)
        self._offsets = [0, *itertools.accumulate(part.num_samples for part in parts)]
        self.num_samples = self._offsets[-1]
        self.num_of_epoch = _shares(self.num_samples, weights)
        identity = [
            [part.fingerprint, part.num_samples, num] for part, num in zip(parts, self.num_of_epoch, strict=True)
        ]
        self.fingerprint = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()

    def sample(self, index: int) -> Sample:
        """One sample.

        Args:
            index: Its number, from 0 to `num_samples` - 1.

        Raises:
            IndexError: If there is no such sample.
        """
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of a dataset of {self.num_samples}")
        part = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return self.parts[part].sample(index - self._offsets[part])

    def padding(self) -> Sample:
        """A row that does not enter the loss."""
        return self.parts[0].padding()

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The samples that an epoch takes.

        Args:
            seed: Seed of the run.
            epoch: Number of the epoch.
        """
        which = np.repeat(np.arange(len(self.parts)), self.num_of_epoch)[permutation(self.num_samples, seed, epoch)]
        order = np.empty(self.num_samples, dtype=np.int64)
        for number, num in enumerate(self.num_of_epoch):
            order[which == number] = self._offsets[number] + self._take(number, seed, epoch * num, num)
        return order

    def _take(self, number: int, seed: int, start: int, num: int) -> NDArray[np.int64]:
        """A part's own sequence of samples from some place on: pass after pass, each in an order of its own."""
        size = self.parts[number].num_samples
        first = start // size
        passes = range(first, (start + num - 1) // size + 1)
        # One word more than an epoch's order has, so that parts of one size do not share their orders.
        taken = np.concatenate([permutation(size, seed, each, number) for each in passes])
        return taken[start - first * size :][:num]


Dataset: TypeAlias = PackedDataset | MixedDataset
"""What a run draws samples from."""


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole shares of a total by weight, which add up to it."""
    # In fractions the largest weights do not overflow, and shares that should be equal are.
    fractions = [Fraction(weight) for weight in weights]
    exact = [total * fraction / sum(fractions) for fraction in fractions]
    shares = [int(each) for each in exact]
    by_remainder = sorted(range(len(weights)), key=lambda number: (shares[number] - exact[number], number))
    for number in by_remainder[: total - sum(shares)]:
        shares[number] += 1
    if min(shares) == 0:
        number = shares.index(0)
        raise ValueError(
            f"weight={weights[number]} of source {number} of the mixture is less than one of the {total} samples of an "
            f"epoch; the weights are {', '.join(map(str, weights))}: raise it, or leave the source out"
        )
    return shares
