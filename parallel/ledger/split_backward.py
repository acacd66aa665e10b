"""Says what a block of a dense decoder holds where gradients of its weights are computed apart from those of its input.

The graph of forward stays until the last of them is there: what backward has used on its way to the input is freed only
then, and what each weight's gradient starts from is kept beside it.
"""

from collections.abc import Callable
from typing import NamedTuple

from parallel.ledger.block_backward import backward
from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.ends_memory import Stretch
from parallel.ledger.norm_memory import norm_weight
from parallel.ledger.pieces import Memory, Piece, Saved

_ORDER = ("attention norm", "q", "k", "v", "o", "q norm", "k norm", "feed-forward norm", "gate", "up", "down")
"""In which weights come, as the model lists its parameters."""

_LAST_READ = {"v": "attention input", "o": "back", "up": "feed-forward input", "down": "hidden"}
"""What a projection was given and is freed with the gradient of its weight, where no other one has been given it."""


class SplitBackward(NamedTuple):
    """The backward of a block, or of what follows on the last one, in two parts.

    Attributes:
        inputs: The way to its input.
        weights: The gradients of its weights.
        left: Bytes that are held until those of the whole stage are there.
    """

    inputs: Stretch
    weights: Stretch
    left: int = 0


def inputs_backward(memory: Memory, sizes: BlockSizes, grads: list[Piece], saved: Saved, *, again: bool) -> Saved:
    """Runs the part of backward that leads to a block's input.

    Args:
        memory: Where.
        sizes: Of the block.
        grads: Holds the gradient of the stream after the block, and then that of the stream before it.
        saved: What forward kept. What was computed again is taken out of it.
        again: Whether it was computed again: each walk then computes anew what it needs.

    Returns:
        What the gradients of weights start from, by projection and norm.
    """
    later: Saved = {}
    backward(memory, sizes, grads, saved if again else dict(saved), [], later)
    return later


def weights_backward(
    memory: Memory,
    sizes: BlockSizes,
    walks: list[Saved],
    later: Saved,
    weights: list[Piece],
    recompute: Callable[[], Saved] | None,
) -> None:
    """Computes the gradients of a block's weights, each by a walk of its own.

    Args:
        memory: Where.
        sizes: Of the block.
        walks: What is there of forward's results, as kept and as each walk has computed it again. What has been used
            for a weight is freed in all of them, the rest stays as long as the graph does.
        later: What gradients start from; taken out of it.
        weights: Gets them.
        recompute: Runs the forward of the block once more, as a walk through a checkpoint does. None: there is none.
    """
    gone: set[str] = set()
    for name in [each for each in _ORDER if each in later]:
        if recompute is not None:
            walks.append(recompute())
        if name in sizes.weights:
            weights.append(memory.new(sizes.weights[name]))
            del later[name]
            gone.add(_LAST_READ.get(name, ""))
        else:
            gone.update(norm_weight(memory, walks[-1], name, later))
        for walk in walks:
            for each in gone:
                walk.pop(each, None)
