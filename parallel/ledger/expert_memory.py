"""Says what a layer with experts holds between the norm before it and the stream behind it, on one rank."""

from collections.abc import Callable
from typing import NamedTuple

from parallel.ledger.block_gradients import BlockGradients
from parallel.ledger.pieces import Memory, Piece, Saved

INT64 = 8


class ExpertSizes(NamedTuple):
    """Sizes of a layer with experts on one rank.

    Attributes:
        tokens: Tokens that the rank routes.
        experts: Experts of the layer, on all ranks.
        rows: Tokens times the experts of each.
        arrived: Rows that come to the experts of this rank.
        row: Bytes of a row of the stream.
        hidden: Bytes of a row between the projections of an expert.
        itemsize: Of one element.
        sum_itemsize: Of scores.
        matrix: Bytes of the gradient of one projection of all experts of this rank.
        router: Bytes of that of the router.
        travels: Whether rows go to other ranks.
        drops: Whether experts have room for so many rows only.
        has_bias: Whether a bias takes part where experts are picked.
        shared: Bytes between the projections of the expert that all tokens pass; 0: there is none.
    """

    tokens: int
    experts: int
    rows: int
    arrived: int
    row: int
    hidden: int
    itemsize: int
    sum_itemsize: int
    matrix: int
    router: int
    travels: bool
    drops: bool
    has_bias: bool
    shared: int

    @property
    def scores(self) -> int:
        """Bytes of the scores of all experts."""
        return self.tokens * self.experts * self.sum_itemsize


class ExpertLayer:
    """One layer in one pass, forward or backward."""

    def __init__(self, memory: Memory, sizes: ExpertSizes, gradients: BlockGradients) -> None:
        """Nothing is held.

        Args:
            memory: Where it runs.
            sizes: Of the layer.
            gradients: Where gradients flow in the block.
        """
        self._memory, self._sizes, self._gradients = memory, sizes, gradients

    def forward(self, make: Callable[[str, int], Piece], out_bytes: int, saved: Saved | None) -> Piece:
        """From the norm to what is added to the stream.

        Args:
            make: Gives the result of an op by name and size.
            out_bytes: Size of what is added.
            saved: Gets what backward needs. None: nothing is kept.
        """
        memory, sizes, kept = self._memory, self._sizes, Saved()
        self._route(make, kept)
        rows = self._sent()
        if sizes.travels:
            rows = self._reordered(self._travelled(rows, sizes.arrived), sizes.arrived)
        wide = sizes.arrived * sizes.hidden
        gate, up = make("gate", wide), make("up", wide)
        hidden = memory.new(wide)
        kept.update(gate=gate, up=up)
        if self._gradients.keeps_input("gate", "up"):
            kept["rows"] = rows
        if self._gradients.keeps_input("down"):
            kept["hidden"] = hidden
        out = make("down", sizes.arrived * sizes.row)
        del gate, up, hidden
        if sizes.travels:
            out = self._travelled(self._reordered(out, sizes.arrived), sizes.rows)
        if sizes.drops:
            out = memory.new(sizes.rows * sizes.row)
        back = memory.new(sizes.rows * sizes.row)
        kept["back"] = back
        summed = memory.new(out_bytes)
        del rows, out, back
        if sizes.shared:
            summed = self._shared(kept, out_bytes, summed)
        if saved is not None:
            saved.update(kept)
        return summed

    def _shared(self, kept: Saved, out_bytes: int, summed: Piece) -> Piece:
        """Adds what the shared expert gives."""
        memory = self._memory
        for name in ("shared gate", "shared up", "shared hidden"):
            kept[name] = memory.new(self._sizes.shared)
        written = memory.new(out_bytes)
        total = memory.new(out_bytes)
        del written, summed
        return total

    def backward(self, saved: Saved, weights: list[Piece]) -> Piece:
        """The gradient of what the norm gives, while that of the stream is held.

        Args:
            saved: What forward kept; taken out of it.
            weights: Gets the gradients of weights.
        """
        memory, sizes, trained = self._memory, self._sizes, self._gradients.trained
        scores = memory.new(sizes.scores)
        by_shared = self._shared_backward(saved, weights) if sizes.shared else None
        grad = memory.new(sizes.rows * sizes.row)
        del saved["back"]
        grad = self._reordered(grad, sizes.rows)
        if sizes.travels:
            grad = self._reordered(self._travelled(grad, sizes.arrived), sizes.arrived)
        wide = sizes.arrived * sizes.hidden
        weights.append(memory.new(sizes.matrix if "down" in trained else 0))
        inner = memory.new(wide)
        saved.pop("hidden", None)
        del grad
        product, gate = memory.new(wide), memory.new(wide)
        del product
        up = memory.new(wide)
        del inner, saved["gate"], saved["up"]
        weights.append(memory.new(sizes.matrix if "up" in trained else 0))
        one = memory.new(sizes.arrived * sizes.row)
        del up
        weights.append(memory.new(sizes.matrix if "gate" in trained else 0))
        other = memory.new(sizes.arrived * sizes.row)
        del gate
        saved.pop("rows", None)
        grad = memory.new(sizes.arrived * sizes.row)
        del one, other
        if sizes.travels:
            grad = self._travelled(self._reordered(grad, sizes.arrived), sizes.rows)
        grad = self._reordered(grad, sizes.rows)
        by_experts = memory.new(sizes.tokens * sizes.row)
        del grad, scores
        for name in ("scores", "choices", "order"):
            del saved[name]
        weights.append(memory.new(sizes.router if "router" in trained else 0))
        by_router = memory.new(sizes.tokens * sizes.row)
        both = memory.new(sizes.tokens * sizes.row)
        del by_experts, by_router
        if by_shared is not None:
            both = memory.new(sizes.tokens * sizes.row)
        del by_shared
        return both

    def _shared_backward(self, saved: Saved, weights: list[Piece]) -> Piece:
        memory, sizes = self._memory, self._sizes
        weight = (
            sizes.shared // sizes.tokens * sizes.row // sizes.itemsize if "router" in self._gradients.trained else 0
        )
        weights.append(memory.new(weight))
        inner = memory.new(sizes.shared)
        del saved["shared hidden"]
        product, gate = memory.new(sizes.shared), memory.new(sizes.shared)
        del product
        up = memory.new(sizes.shared)
        del inner, saved["shared gate"], saved["shared up"]
        weights.append(memory.new(weight))
        one = memory.new(sizes.tokens * sizes.row)
        del up
        weights.append(memory.new(weight))
        other = memory.new(sizes.tokens * sizes.row)
        del gate
        total = memory.new(sizes.tokens * sizes.row)
        del one, other
        return total

    def _route(self, make: Callable[[str, int], Piece], kept: Saved) -> None:
        memory, sizes = self._memory, self._sizes
        logits = make("router", sizes.tokens * sizes.experts * sizes.itemsize)
        if sizes.itemsize < sizes.sum_itemsize:
            logits = memory.new(sizes.scores)
        kept["scores"] = memory.new(sizes.scores)
        ranked = memory.new(sizes.scores if sizes.has_bias else 0)
        # Numbers of the experts, their scores, the sums of these and the shares in them.
        numbers = 2 * (sizes.rows + sizes.tokens) * sizes.sum_itemsize
        kept["choices"] = memory.new(sizes.rows * INT64 + numbers)
        del logits, ranked
        # To the order of experts and back, here and where rows arrive.
        kept["order"] = memory.new(2 * (sizes.rows + sizes.travels * sizes.arrived) * INT64)

    def _sent(self) -> Piece:
        """The rows of all tokens by expert."""
        size = self._sizes.rows * self._sizes.row
        return self._reordered(self._memory.new(size), self._sizes.rows)

    def _reordered(self, rows: Piece, count: int) -> Piece:
        reordered = self._memory.new(count * self._sizes.row)
        del rows
        return reordered

    def _travelled(self, rows: Piece, count: int) -> Piece:
        arrived = self._memory.new(count * self._sizes.row)
        del rows
        return arrived
