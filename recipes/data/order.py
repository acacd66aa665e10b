"""Orders that follow from a seed alone."""

import numpy as np
from numpy.typing import NDArray


def permutation(num: int, seed: int, *more: int) -> NDArray[np.int64]:
    """The numbers from 0 to `num` - 1, shuffled.

    Args:
        num: How many.
        seed: Seed of the run.
        more: Numbers that tell one order of it from another.
    """
    # RandomState, because its stream is frozen: numpy may change that of newer generators, and resuming would reorder.
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, *more]
    return np.random.RandomState(words).permutation(num)
