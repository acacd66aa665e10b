"""Says what a block of a dense decoder holds while it runs forward and backward, tensor by tensor.

The order in which tensors come and go is that of the models' layers on a CPU, where norms of float32 are written out
and others are composed of elementary operators.
"""

from collections.abc import Collection

from parallel.ledger.attention_memory import attend, attend_backward
from parallel.ledger.block_gradients import LowRank
from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.norm_memory import Saved, gathered, norm_backward, norm_forward, summed
from parallel.ledger.pieces import Memory, Piece


class _Results:
    """Results of a block's ops: computed, kept by a policy, or taken from what it kept."""

    def __init__(
        self,
        memory: Memory,
        sizes: BlockSizes,
        kept: Collection[str],
        cache: Saved,
        saved: Saved | None,
        *,
        again: bool,
    ) -> None:
        self._memory, self._sizes, self._kept, self._cache = memory, sizes, kept, cache
        self._saved, self._again = saved, again

    def __call__(self, name: str, num_bytes: int) -> Piece:
        """The result of that name, with what an adapter adds to it."""
        out, adapter = self._result(name, num_bytes), self._sizes.gradients.adapter(name)
        if adapter is None:
            return out
        low = self._result(f"{name} first", self._sizes.low(adapter))
        if self._saved is not None:
            self._saved[f"{name} low"] = low
        wide = self._result(f"{name} second", num_bytes)
        scaled = self._memory.new(num_bytes)
        del wide, low
        total = self._memory.new(num_bytes)
        del out, scaled
        return total

    def _result(self, name: str, num_bytes: int) -> Piece:
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
    hold, gradients = kept is None or again, sizes.gradients
    make = _Results(memory, sizes, kept or (), cache, saved if hold else None, again=again)

    def write(name: str) -> Piece:
        """What a projection adds to the stream; of a sum over ranks the sum is what may be kept."""
        if not sizes.splits:
            return make(name, sizes.whole)
        partial = [memory.new(sizes.whole)]
        if sizes.splits_stream:
            partial.append(memory.new(sizes.whole))
        return make(name, sizes.stream)

    def read(x: Piece, name: str, readers: tuple[str, ...]) -> tuple[Piece, Piece]:
        """What projections read; whoever calls a module holds the rank's own part of it too."""
        own = norm_forward(memory, sizes, x, saved, f"{name} norm")
        whole = gathered(memory, sizes, own)
        if gradients.keeps_input(*readers):
            saved[f"{name} input"] = whole
        if not hold:
            saved.clear()
        return own, whole

    def first(x: Piece) -> Piece:
        inputs = read(x, "attention", ("q", "k", "v"))
        out = attend(memory, sizes, make, saved if hold else None)
        written = write("o")
        del inputs, out
        return written

    def second(x: Piece) -> Piece | None:
        inputs = read(x, "feed-forward", ("gate", "up"))
        gate, up = make("gate", sizes.hidden), make("up", sizes.hidden)
        hidden = memory.new(sizes.hidden)
        if hold and "hidden" in gradients.followed:
            saved.update(gate=gate, up=up)
        if hold and gradients.keeps_input("down"):
            saved.update(hidden=hidden)
        del gate, up
        written = write("down") if not again or gradients.adapter("down") is not None else None
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
        grads: Holds the gradient of the stream after the block, and then that of the stream before it, if it has one.
        saved: What forward kept; taken out of it.
        weights: Gets the gradients of weights.
    """
    _Backward(memory, sizes, grads, saved, weights).run()


class _Backward:
    """The backward of a block."""

    def __init__(
        self, memory: Memory, sizes: BlockSizes, grads: list[Piece], saved: Saved, weights: list[Piece]
    ) -> None:
        self._memory, self._sizes, self._grads, self._saved, self._weights = memory, sizes, grads, saved, weights
        self._outputs = {"q": sizes.queries, "k": sizes.keys, "v": sizes.keys} | dict.fromkeys(
            ("o", "down"), sizes.whole
        )
        self._outputs |= dict.fromkeys(("gate", "up"), sizes.hidden)

    def run(self) -> None:
        """Feed-forward layer, then attention."""
        memory, sizes, grads, saved = self._memory, self._sizes, self._grads, self._saved
        followed = sizes.gradients.followed
        whole = gathered(memory, sizes, grads[0])
        inner = self._back(("down",), [], sizes.hidden, ("hidden", "hidden"))
        del whole
        if "middle" not in followed:
            grads.clear()
        if inner:
            product = memory.new(sizes.hidden)
            parts = [memory.new(sizes.hidden)]
            del product
            parts.append(memory.new(sizes.hidden))
            del saved["gate"], saved["up"]
            inner.clear()
            self._read(("up", "gate"), parts, "feed-forward", "middle")
        if "o" in followed:
            whole = gathered(memory, sizes, grads[0])
            parts = self._back(("o",), [], sizes.queries, ("attention", "back"))
            del whole
            if "x" not in followed:
                grads.clear()
            if parts:
                attend_backward(memory, sizes, parts, saved)
                self._read(("v", "k", "q"), parts, "attention", "x")

    def _read(self, names: tuple[str, ...], parts: list[Piece], name: str, stream: str) -> None:
        """From the gradients of several projections, the last first, to that of the stream that they read."""
        memory, sizes, grads = self._memory, self._sizes, self._grads
        total = self._back(names, parts, sizes.whole, (f"{name} norm", f"{name} input"))
        if not total:
            return
        inner = [summed(memory, sizes, total)]
        before = norm_backward(memory, sizes, inner, self._saved, f"{name} norm")
        if stream in sizes.gradients.followed:
            grads.append(memory.new(sizes.stream))
            del before, grads[0]

    def _back(self, names: tuple[str, ...], parts: list[Piece], num_bytes: int, reads: tuple[str, str]) -> list[Piece]:
        """From the gradients of projections to that of what all of them read, if it has one.

        Args:
            names: The projections in the order of backward.
            parts: Their gradients, the last first; freed one by one. Nothing: others hold them.
            num_bytes: Size of what they read.
            reads: What that is called among results, and among what is kept.
        """
        gradients, total = self._sizes.gradients, list[Piece]()
        for index, name in enumerate(names):
            later = gradients.keeps_input(*names[index + 1 :])
            if name in gradients.followed and (adapter := gradients.adapter(name)) is not None:
                self._add(total, self._through_adapter(name, adapter, num_bytes, reads[0]))
                if name not in gradients.trained and not later:
                    self._saved.pop(reads[1], None)
            part = self._through(name, num_bytes, reads[0])
            if parts:
                parts.pop()
            if not later:
                self._saved.pop(reads[1], None)
            self._add(total, part)
            del part
        return total

    def _through_adapter(self, name: str, adapter: LowRank, num_bytes: int, reads: str) -> Piece | None:
        memory, sizes = self._memory, self._sizes
        scaled = memory.new(self._outputs[name])
        self._weights.append(memory.new(adapter.second * sizes.itemsize))
        low = memory.new(sizes.low(adapter))
        del scaled, self._saved[f"{name} low"]
        self._weights.append(memory.new(adapter.first * sizes.itemsize))
        inner = memory.new(num_bytes) if reads in sizes.gradients.followed else None
        del low
        return inner

    def _through(self, name: str, num_bytes: int, reads: str) -> Piece | None:
        gradients = self._sizes.gradients
        weight = self._memory.new(self._sizes.weights[name] if name in gradients.trained else 0)
        is_followed = name in gradients.followed and reads in gradients.followed
        inner = self._memory.new(num_bytes) if is_followed else None
        self._weights.append(weight)
        return inner

    def _add(self, total: list[Piece], part: Piece | None) -> None:
        if part is not None and total:
            total[0] = self._memory.new(part.num_bytes)
        elif part is not None:
            total.append(part)
