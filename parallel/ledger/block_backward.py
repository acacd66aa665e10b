"""Says what a block of a decoder holds while it runs backward, tensor by tensor."""

from parallel.ledger.attention_memory import attend_backward
from parallel.ledger.block_gradients import LowRank
from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.expert_memory import ExpertLayer
from parallel.ledger.norm_memory import gathered, norm_backward, summed
from parallel.ledger.pieces import Memory, Piece, Saved


def backward(
    memory: Memory,
    sizes: BlockSizes,
    grads: list[Piece],
    saved: Saved,
    weights: list[Piece],
    later: Saved | None = None,
) -> None:
    """Runs the backward of a block.

    Args:
        memory: Where.
        sizes: Of the block.
        grads: Holds the gradient of the stream after the block, and then that of the stream before it, if it has one.
        saved: What forward kept, and copies of weights that are freed after use; taken out of it.
        weights: Gets the gradients of weights.
        later: Gets, by projection and norm, what gradients of weights are to be computed from later. None: they are
            computed at once.
    """
    _Backward(memory, sizes, grads, saved, weights, later).run()


class _Backward:
    """The backward of a block."""

    def __init__(
        self,
        memory: Memory,
        sizes: BlockSizes,
        grads: list[Piece],
        saved: Saved,
        weights: list[Piece],
        later: Saved | None,
    ) -> None:
        self._memory, self._sizes, self._grads, self._saved, self._weights = memory, sizes, grads, saved, weights
        self._later = later
        self._outputs = {"q": sizes.queries, "k": sizes.keys, "v": sizes.keys} | dict.fromkeys(
            ("o", "down"), sizes.whole
        )
        self._outputs |= dict.fromkeys(("gate", "up"), sizes.hidden)

    def run(self) -> None:
        """Feed-forward layer, then attention."""
        memory, sizes, grads, saved = self._memory, self._sizes, self._grads, self._saved
        followed = sizes.gradients.followed
        if sizes.experts is not None:
            whole = gathered(memory, sizes, grads[0])
            total = [ExpertLayer(memory, sizes.experts, sizes.gradients).backward(saved, self._weights)]
            # Kept for the router alone, which may be frozen.
            saved.pop("feed-forward input", None)
            del whole
            self._to_stream(total, "feed-forward", "middle")
        else:
            self._feed_forward()
        if "o" in followed:
            whole = gathered(memory, sizes, grads[0])
            self._leave("o", whole)
            parts = self._back(("o",), [], sizes.queries, ("attention", "back"))
            del whole
            if "x" not in followed:
                grads.clear()
            if parts:
                attend_backward(memory, sizes, parts, saved, self._later)
                self._read(("v", "k", "q"), parts, "attention", "x")

    def _feed_forward(self) -> None:
        memory, sizes, grads, saved = self._memory, self._sizes, self._grads, self._saved
        whole = gathered(memory, sizes, grads[0])
        self._leave("down", whole)
        inner = self._back(("down",), [], sizes.hidden, ("hidden", "hidden"))
        del whole
        if "middle" not in sizes.gradients.followed:
            grads.clear()
        if inner:
            product = memory.new(sizes.hidden)
            parts = [memory.new(sizes.hidden)]
            del product
            parts.append(memory.new(sizes.hidden))
            del saved["gate"], saved["up"]
            inner.clear()
            self._read(("up", "gate"), parts, "feed-forward", "middle")

    def _read(self, names: tuple[str, ...], parts: list[Piece], name: str, stream: str) -> None:
        """From the gradients of several projections, the last first, to that of the stream that they read."""
        total = self._back(names, parts, self._sizes.whole, (f"{name} norm", f"{name} input"))
        if total:
            self._to_stream(total, name, stream)

    def _to_stream(self, total: list[Piece], name: str, stream: str) -> None:
        """From the gradient of what a norm gives to that of the stream before it."""
        memory, sizes, grads = self._memory, self._sizes, self._grads
        inner = [summed(memory, sizes, total)]
        before = norm_backward(memory, sizes, inner, self._saved, f"{name} norm", self._later)
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
            if parts:
                self._leave(name, parts[-1])
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
        self._weigh(f"{name} second", adapter.second, scaled)
        low = memory.new(sizes.low(adapter))
        del scaled, self._saved[f"{name} low"]
        self._weigh(f"{name} first", adapter.first, low)
        inner = memory.new(num_bytes) if reads in sizes.gradients.followed else None
        del low
        return inner

    def _through(self, name: str, num_bytes: int, reads: str) -> Piece | None:
        gradients = self._sizes.gradients
        is_made = name in gradients.trained and self._later is None
        weight = self._memory.new(self._sizes.weights[name] if is_made else 0)
        is_followed = name in gradients.followed and reads in gradients.followed
        inner = self._memory.new(num_bytes) if is_followed else None
        self._weights.append(weight)
        self._saved.pop(f"{name} copy", None)
        return inner

    def _weigh(self, name: str, count: int, grad: Piece) -> None:
        """The gradient of an adapter's matrix, or what it is to be computed from later."""
        if self._later is None:
            self._weights.append(self._memory.new(count * self._sizes.itemsize))
        else:
            self._later[name] = grad

    def _leave(self, name: str, grad: Piece) -> None:
        """Leaves the gradient of what a projection gives for that of its weight."""
        if self._later is not None and name in self._sizes.gradients.trained:
            self._later[name] = grad

    def _add(self, total: list[Piece], part: Piece | None) -> None:
        if part is not None and total:
            total[0] = self._memory.new(part.num_bytes)
        elif part is not None:
            total.append(part)
