"""Works out what one block does to memory, forward and backward, the latter in one piece or in two."""

from collections.abc import Mapping

from parallel.ledger.block_backward import backward
from parallel.ledger.block_run import BlockRun, Borrowed, Kept
from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.ends_memory import Stretch
from parallel.ledger.pieces import Memory, Piece, Saved
from parallel.ledger.split_backward import SplitBackward, inputs_backward, pass_by, weights_backward


class _Passing(list[Piece]):
    """Holds nothing of what is put in."""

    def append(self, piece: Piece) -> None:
        """Lets go of it."""


def whole_block(
    sizes: BlockSizes,
    kept: Kept,
    borrowed: Borrowed,
    copied: Mapping[str, int],
    own_copies: int,
    *,
    keeps_gradients: bool,
    trained: int,
) -> tuple[Stretch, Stretch]:
    """Forward of a block, and its backward, computing again included.

    Args:
        sizes: Of the block.
        kept: Which results it keeps.
        borrowed: What others hold.
        copied: Bytes of the copies of matrices that backward frees after use, by name.
        own_copies: Bytes of all copies of parameters that the block makes itself whenever it runs; 0: it makes none.
        keeps_gradients: Whether those of weights stay where they were made until it is done.
        trained: Bytes of those that stay in the end.
    """
    block = BlockRun(sizes, kept, borrowed)
    memory, ahead = block.memory, block.ahead._replace(above=block.ahead.above + own_copies)
    if "out" not in sizes.gradients.followed:
        return ahead, Stretch(0, 0)
    copies = {} if own_copies else _new(memory, copied)
    base = block.arrive()
    if own_copies:
        copies, others = _new(memory, copied), memory.new(own_copies - sum(copied.values()))
        saved = block.recompute()
        del others
    else:
        saved = block.saved if kept is None else block.recompute()
    saved.update(copies)
    copies.clear()
    weights: list[Piece] = [] if keeps_gradients else _Passing()
    backward(memory, sizes, block.grads, saved, weights)
    block.clear()
    saved.clear()
    # Those of norms and biases are few.
    held = memory.now - base - sum(each.num_bytes for each in weights) + trained
    return ahead, Stretch(held, memory.peak - base)


def _new(memory: Memory, copied: Mapping[str, int]) -> Saved:
    return {f"{name} copy": memory.new(size) for name, size in copied.items()}


def split_block(
    sizes: BlockSizes, kept: Kept, borrowed: Borrowed, *, keeps_gradients: bool, trained: int, is_top: bool
) -> SplitBackward:
    """Backward of a block in two parts.

    Args:
        sizes: Of the block.
        kept: Which results it keeps.
        borrowed: What others hold.
        keeps_gradients: Whether those of weights stay where they were made.
        trained: Bytes of those that stay in the end.
        is_top: Whether no weight behind the block is trained.
    """
    block = BlockRun(sizes, kept, borrowed)
    memory, base = block.memory, block.arrive()
    again, passes = kept is not None, is_top and sizes.experts is None
    walks = [block.recompute() if again else block.saved]
    later = inputs_backward(memory, sizes, block.grads, walks[0], again=again)
    inputs = Stretch(memory.now - base, memory.peak - base)
    before = memory.now
    if passes:
        pass_by(sizes, walks[0])
    after = memory.peak = memory.now

    def recompute() -> Saved:
        saved = block.recompute()
        if passes:
            pass_by(sizes, saved)
        return saved

    weights: list[Piece] = [] if keeps_gradients else _Passing()
    weights_backward(memory, sizes, walks, later, weights, recompute if again else None)
    held = memory.now - after - sum(each.num_bytes for each in weights) + trained
    apart = Stretch(held, memory.peak - after)
    end = memory.now
    walks.clear()
    block.clear()
    return SplitBackward(inputs, apart, end - memory.now, before - after)
