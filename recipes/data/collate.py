"""Samples to the batches that a step takes."""

from collections.abc import Sequence

import numpy as np
import torch

from parallel.batch import Batch
from recipes.data.mixture import Dataset


def collate(dataset: Dataset, sample_ids: Sequence[int], num_rows: int) -> Batch:
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
