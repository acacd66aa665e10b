"""Says what a block of a dense decoder holds while it runs forward and backward, tensor by tensor.

The order in which tensors come and go is that of the models' layers on a CPU, where norms of float32 are written out
and others are composed of elementary operators.
"""

from collections.abc import Collection

from parallel.ledger.attention_memory import attend, attend_backward
from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.norm_memory import Saved, gathered, norm_backward, norm_forward, summed
from parallel.ledger.pieces import Memory, Piece


class _Results:
    """Results of a block's ops: computed, kept by a policy, or taken from what it kept."""

    def __init__(self, memory: Memory, kept: Collection[str], cache: Saved, *, again: bool) -> None:
        self._memory, self._kept, self._cache, self._again = memory, kept, cache, again

    def __call__(self, name: str, num_bytes: int) -> Piece:
        """The result of that name."""
        if self._again and name in self._cache:
            return self._cache.pop(name)
        piece = self._memory.new(num_bytes)
        if not self._again and name in self._kept:
            self._cache[name] = piece
        return piece


def forward(
    memory: Memory,
    sizes: BlockSizes,
    x: Piece,
    *,
    kept: Collection[str] | None,
    cache: Saved,
    again: bool = False,
) -> tuple[Piece, Saved]:
    """Runs a block.

    Args:
        memory: Where.
        sizes: Of the block.
        x: The stream before it, which its caller holds.
        kept: Names of results that are kept where nothing else is. None: all that backward needs is.
        cache: Where they are kept; computing again takes them from there.
        again: Whether it is computed again, which ends when backward has all that it needs.

    Returns:
        The stream after it; what is kept for backward.
    """
    saved: Saved = {}
    hold = kept is None or again
    make = _Results(memory, kept or (), cache, again=again)

    def write(name: str) -> Piece:
        """What a projection adds to the stream; of a sum over ranks the sum is what may be kept."""
        if not sizes.splits:
            return make(name, sizes.whole)
        partial = [memory.new(sizes.whole)]
        if sizes.splits_stream:
            partial.append(memory.new(sizes.whole))
        return make(name, sizes.stream)

    def read(x: Piece, name: str) -> tuple[Piece, Piece]:
        """What projections read; whoever calls a module holds the rank's own part of it too."""
        own = norm_forward(memory, sizes, x, saved, f"{name} norm")
        whole = gathered(memory, sizes, own)
        saved[f"{name} input"] = whole
        if not hold:
            saved.clear()
        return own, whole

    def first(x: Piece) -> Piece:
        inputs = read(x, "attention")
        out = attend(memory, sizes, make, saved if hold else None)
        written = write("o")
        del inputs, out
        return written

    def second(x: Piece) -> Piece | None:
        inputs = read(x, "feed-forward")
        gate, up = make("gate", sizes.hidden), make("up", sizes.hidden)
        hidden = memory.new(sizes.hidden)
        if hold:
            saved.update(gate=gate, up=up, hidden=hidden)
        del gate, up
        written = None if again else write("down")
        del inputs, hidden
        return written

    attended = first(x)
    middle = memory.new(sizes.stream)
    del attended
    fed = second(middle)
    return (x, saved) if fed is None else (memory.new(sizes.stream), saved)


def backward(memory: Memory, sizes: BlockSizes, grads: list[Piece], saved: Saved, weights: list[Piece]) -> None:
    """Runs the backward of a block.

    Args:
        memory: Where.
        sizes: Of the block.
        grads: Holds the gradient of the stream after the block, and then that of the stream before it.
        saved: What forward kept; taken out of it.
        weights: Gets the gradients of weights.
    """

    def linear(name: str, num_bytes: int) -> Piece:
        weight, inner = memory.new(sizes.weights[name]), memory.new(num_bytes)
        weights.append(weight)
        return inner

    def read(names: tuple[str, ...], parts: list[Piece], name: str) -> None:
        """From the gradients of several projections, the last first, to that of the stream that they read."""
        total: list[Piece] = []
        for each in names:
            part = linear(each, sizes.whole)
            parts.pop()
            if each == names[-1]:
                del saved[f"{name} input"]
            if total:
                both = memory.new(sizes.whole)
                total[0] = both
                del both
            else:
                total.append(part)
            del part
        inner = [summed(memory, sizes, total)]
        before = norm_backward(memory, sizes, inner, saved, f"{name} norm")
        grads.append(memory.new(sizes.stream))
        del before, grads[0]

    whole = gathered(memory, sizes, grads[0])
    hidden = linear("down", sizes.hidden)
    del whole, saved["hidden"]
    product = memory.new(sizes.hidden)
    gate = memory.new(sizes.hidden)
    del product
    parts = [gate, memory.new(sizes.hidden)]
    del gate, hidden, saved["gate"], saved["up"]
    read(("up", "gate"), parts, "feed-forward")
    whole = gathered(memory, sizes, grads[0])
    parts = [linear("o", sizes.queries)]
    del whole
    attend_backward(memory, sizes, parts, saved)
    read(("v", "k", "q"), parts, "attention")
