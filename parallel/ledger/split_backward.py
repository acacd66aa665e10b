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

_READS = dict.fromkeys("qkv", "attention input") | {"o": "back", "down": "hidden"}
_READS |= dict.fromkeys(("gate", "up"), "feed-forward input")
"""What a projection was given and is freed with the last gradient of a weight that has been given it."""

_KEPT_BY_NORMS = ("x", "rows", "normal")
_AFTER_NORM = ("feed-forward input", "gate low", "up low", *(f"feed-forward norm {each}" for each in _KEPT_BY_NORMS))
_FROM_TOP: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (frozenset({"down"}), ("hidden", "down low", "gate", "up")),
    (frozenset({"gate", "up", "feed-forward norm"}), _AFTER_NORM),
    (frozenset({"o"}), ("back", "o low", "q", "k", "v", "out", "mask")),
)
"""What has weights, from a block's end to its start, and what backward keeps there and passes before it comes to the
next ones."""


class SplitBackward(NamedTuple):
    """The backward of a block, or of what follows on the last one, in two parts.

    Attributes:
        inputs: The way to its input.
        weights: The gradients of its weights.
        left: Bytes that are held until those of the whole stage are there.
        passed: Bytes that go when the stage's input has its gradient: what no weight is behind is no part of the graph
            that stays.
    """

    inputs: Stretch
    weights: Stretch
    left: int = 0
    passed: int = 0


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
    own = _weights_of(sizes)
    left = [each for each in own if each in later]
    while left:
        name = left.pop(0)
        if recompute is not None:
            walks.append(recompute())
        if name in own and own[name].num_bytes:
            weights.append(memory.new(own[name].num_bytes))
            del later[name]
            gone.update({own[name].reads} - {own[each].reads for each in left})
        else:
            gone.update(norm_weight(memory, walks[-1], name, later))
        for walk in walks:
            for each in gone:
                walk.pop(each, None)


def pass_by(sizes: BlockSizes, saved: Saved) -> None:
    """Lets go of what is nearer to the end of a block than all of its weights, where none is behind the block either.

    Args:
        sizes: Of the block.
        saved: What is there of forward's results.
    """
    trained = sizes.gradients.trained.union(name for name, _ in sizes.gradients.adapters)
    if not trained:
        saved.clear()
    for names, kept in _FROM_TOP:
        if names & trained:
            return
        for each in kept:
            saved.pop(each, None)
    for name in {"q norm", "k norm"} - trained:
        for each in _KEPT_BY_NORMS:
            saved.pop(f"{name} {each}", None)


class _Weight(NamedTuple):
    """A weight whose gradient is a product."""

    num_bytes: int
    reads: str


def _weights_of(sizes: BlockSizes) -> dict[str, _Weight]:
    """Weights of a block by name, in the order in which they come; of norms nothing but the name."""
    own: dict[str, _Weight] = {}
    for name in _ORDER:
        own[name] = _Weight(sizes.weights.get(name, 0), _READS.get(name, ""))
        if (adapter := sizes.gradients.adapter(name)) is not None:
            own[f"{name} first"] = _Weight(adapter.first * sizes.itemsize, _READS[name])
            own[f"{name} second"] = _Weight(adapter.second * sizes.itemsize, f"{name} low")
    return own
