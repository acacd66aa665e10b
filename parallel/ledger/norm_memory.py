"""Says what a norm holds, and what `tp` holds around it: the stream is gathered before it is read, and summed after."""

from typing import NamedTuple

from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.pieces import Memory, Piece, Saved


def norm_forward(memory: Memory, sizes: BlockSizes, x: Piece, saved: Saved, name: str) -> Piece:
    """Normalizes the stream; what backward will need goes to `saved`.

    Args:
        memory: Where it runs.
        sizes: Of the block.
        x: The stream.
        saved: Gets what is kept.
        name: Under which names.
    """
    return _forward(memory, x, _How.of(sizes, name, sizes.rows, sizes.writes_out_norms), saved, name)


def head_norm_forward(memory: Memory, sizes: BlockSizes, x: Piece, saved: Saved, name: str) -> Piece:
    """Normalizes queries or keys by head.

    Args:
        memory: Where it runs.
        sizes: Of the block.
        x: Queries or keys.
        saved: Gets what is kept.
        name: Under which names.
    """
    return _forward(memory, x, _How.of(sizes, name, _rows(sizes, x), sizes.writes_out_head_norms), saved, name)


def norm_backward(
    memory: Memory, sizes: BlockSizes, grads: list[Piece], saved: Saved, name: str, later: Saved | None = None
) -> Piece:
    """The gradient of the stream.

    Args:
        memory: Where it runs.
        sizes: Of the block.
        grads: Holds the gradient of what the norm gave; taken out of it.
        saved: What forward kept; taken out of it.
        name: Under which names.
        later: Gets what the gradient of the weight is to be computed from later. None: it is computed at once.
    """
    how = _How.of(sizes, name, sizes.rows, sizes.writes_out_norms)
    return _backward(memory, grads, how, saved, (name, later))


def head_norm_backward(
    memory: Memory, sizes: BlockSizes, grads: list[Piece], saved: Saved, name: str, later: Saved | None = None
) -> Piece:
    """The gradient of queries or keys.

    Args:
        memory: Where it runs.
        sizes: Of the block.
        grads: Holds the gradient of what the norm gave; taken out of it.
        saved: What forward kept; taken out of it.
        name: Under which names.
        later: As of `norm_backward`.
    """
    how = _How.of(sizes, name, _rows(sizes, grads[-1]), sizes.writes_out_head_norms)
    return _backward(memory, grads, how, saved, (name, later))


def norm_weight(memory: Memory, saved: Saved, name: str, later: Saved) -> tuple[str, ...]:
    """The gradient of a norm's weight, where that of its input was computed before.

    Args:
        memory: Where it runs.
        saved: What forward kept.
        name: Under which names.
        later: What was left for this; taken out of it.

    Returns:
        What of `saved` nothing needs any more.
    """
    size = later[name].num_bytes
    product = memory.new(size)
    used: tuple[str, ...] = (f"{name} normal",)
    if used[0] not in saved:
        # Written out it computes what is normal anew.
        used = f"{name} x", f"{name} rows"
        normal = memory.new(size)
        along = memory.new(saved[used[1]].num_bytes)
        del normal, along
    del product, later[name]
    return used


def gathered(memory: Memory, sizes: BlockSizes, part: Piece) -> Piece:
    """The stream of all ranks of `tp`: gathered along tokens as leading dim, and put in order.

    Args:
        memory: Where it runs.
        sizes: Of the block.
        part: This rank's stream.
    """
    if not sizes.splits_stream:
        return part
    arrived = memory.new(sizes.whole)
    ordered = memory.new(sizes.whole)
    del arrived
    return ordered


def summed(memory: Memory, sizes: BlockSizes, partial: list[Piece]) -> Piece:
    """The sum over ranks of `tp` of what each has; of it this rank's tokens where the stream is split.

    Args:
        memory: Where it runs.
        sizes: Of the block.
        partial: Holds what this rank has; taken out of it.
    """
    if not sizes.splits:
        return partial.pop()
    ordered = memory.new(sizes.whole) if sizes.splits_stream else None
    part = memory.new(sizes.stream)
    del ordered
    partial.pop()
    return part


def _rows(sizes: BlockSizes, x: Piece) -> int:
    return (sizes.head_rows or 0) * x.num_bytes // sizes.queries


_READS = {"attention norm": "x", "feed-forward norm": "middle", "q norm": "q", "k norm": "k", "norm": "out"}
"""What each norm reads."""


class _How(NamedTuple):
    """How a norm runs."""

    num_rows: int
    wide: int
    writes_out: bool
    is_followed: bool
    is_trained: bool
    reads_followed: bool

    @classmethod
    def of(cls, sizes: BlockSizes, name: str, num_rows: int, writes_out: bool) -> "_How":
        gradients = sizes.gradients
        return cls(
            num_rows,
            sizes.wide,
            writes_out,
            name in gradients.followed,
            name in gradients.trained,
            _READS[name] in gradients.followed,
        )


def _forward(memory: Memory, x: Piece, how: _How, saved: Saved, name: str) -> Piece:
    num_rows, wide, writes_out, is_followed, is_trained, reads_followed = how
    if writes_out:
        rows = memory.new(num_rows)
        if is_followed:
            saved[f"{name} rows"], saved[f"{name} x"] = rows, x
        return memory.new(x.num_bytes)
    wide_x = x if wide == 1 else memory.new(x.num_bytes * wide)
    squares = memory.new(x.num_bytes * wide)
    rows = memory.new(num_rows)
    normal = memory.new(x.num_bytes * wide)
    del squares
    product = memory.new(x.num_bytes * wide)
    if reads_followed:
        saved[f"{name} x"], saved[f"{name} rows"] = wide_x, rows
    if is_trained:
        saved[f"{name} normal"] = normal
    return product if wide == 1 else memory.new(x.num_bytes)


def _backward(memory: Memory, grads: list[Piece], how: _How, saved: Saved, named: tuple[str, Saved | None]) -> Piece:
    num_rows, wide, writes_out, _, is_trained, reads_followed = how
    name, later = named
    narrow = grads[-1].num_bytes
    size = narrow * wide
    if wide > 1:
        grads[-1] = memory.new(size)
    if later is not None and is_trained:
        later[name] = grads[-1]
    if writes_out:
        normal, product = memory.new(size), memory.new(size)
        rows = memory.new(num_rows)
        del normal, rows
        grads.pop()
        del saved[f"{name} x"], saved[f"{name} rows"]
        return product
    along, product = memory.new(size if reads_followed else 0), memory.new(size if is_trained else 0)
    del product
    grads.pop()
    saved.pop(f"{name} normal", None)
    if not reads_followed:
        return memory.new(0)
    straight, product = memory.new(size), memory.new(size)
    del product, along
    spread, power, double, back = (memory.new(size) for _ in range(4))
    del power, double, spread
    del saved[f"{name} x"], saved[f"{name} rows"]
    total = memory.new(size)
    del straight, back
    return total if wide == 1 else memory.new(narrow)
