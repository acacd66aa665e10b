"""Says what the ends of a model hold while they run: the embedding, and the norm, the logits and the loss."""

from typing import NamedTuple

from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.norm_memory import gathered, norm_backward, norm_forward, norm_weight, summed
from parallel.ledger.pieces import Memory, Piece, Saved

INT64 = 8


class Stretch(NamedTuple):
    """What a part of a step does to memory.

    Attributes:
        held: Bytes that it leaves more than it found.
        above: Most bytes within it above what it found.
    """

    held: int
    above: int


class HeadSizes(NamedTuple):
    """Sizes of the head that blocks do not tell.

    Attributes:
        chunk_tokens: Tokens whose logits exist at a time.
        own: Entries of the vocabulary on this rank.
        gathered: Entries of all ranks, filled up to as many on each, where logits are gathered; else 0.
        vocab_size: Entries of all ranks.
        itemsize: Bytes of a logit as it is computed.
        weight: Bytes of the gradient of the rank's part of the matrix; 0: it is frozen.
        row: Bytes of a token of the stream.
    """

    chunk_tokens: int
    own: int
    gathered: int
    vocab_size: int
    itemsize: int
    weight: int
    row: int


def embed(sizes: BlockSizes) -> Stretch:
    """Looks tokens up; with `tp` each rank those of its part of the vocabulary, and the sum goes round.

    Args:
        sizes: Of a block.
    """
    memory = Memory()
    if not sizes.splits:
        return Stretch(sizes.whole, sizes.whole)
    masks = [memory.new(sizes.tokens), memory.new(sizes.tokens * INT64)]
    partial = [memory.new(sizes.whole)]
    masks.pop()
    part = summed(memory, sizes, partial)
    copy = memory.new(sizes.stream)
    del part
    masks.clear()
    return Stretch(copy.num_bytes, memory.peak)


def embed_backward(sizes: BlockSizes, table: int, *, keeps_gradient: bool) -> Stretch:
    """The gradient of the table; that of the stream goes.

    Args:
        sizes: Of a block.
        table: Bytes of the table's gradient.
        keeps_gradient: Whether it stays where it was made.
    """
    memory = Memory()
    grads = [memory.new(sizes.stream)]
    base = memory.peak = memory.now
    whole = gathered(memory, sizes, grads[0])
    made = memory.new(table)
    grads.clear()
    del whole
    above = memory.peak - base
    if not keeps_gradient:
        del made
    return Stretch(memory.now - base, above)


def loss(sizes: BlockSizes, head: HeadSizes, *, splits: bool = False) -> tuple[Stretch, ...]:
    """Norm, logits by chunk, loss and its gradients; and the way back from there to the last block.

    Args:
        sizes: Of a block.
        head: Of the head.
        splits: Whether gradients of weights are computed apart, which makes two parts of the way back.
    """
    memory = Memory()
    saved: Saved = {}
    stream = [memory.new(sizes.stream)]
    base = memory.now
    own = norm_forward(memory, sizes, stream[0], saved, "norm")
    whole = gathered(memory, sizes, own)
    is_followed = "norm" in sizes.gradients.followed
    grad, weight = [memory.new(sizes.whole if is_followed else 0)], memory.new(head.weight)
    buffer = memory.new(min(head.chunk_tokens, sizes.tokens) * head.own * head.itemsize)
    left = None
    for _ in range(min(2, -(-sizes.tokens // head.chunk_tokens))):
        left = _chunk(memory, sizes, head, left)
    stream.clear()
    del buffer, left, whole, own
    ahead = Stretch(memory.now - base, memory.peak - base)
    base = memory.peak = memory.now
    if splits:
        return ahead, *_split_way_back(memory, sizes, head, grad, saved)
    grads = [summed(memory, sizes, grad)] if is_followed else grad
    last = norm_backward(memory, sizes, grads, saved, "norm") if is_followed else None
    back = Stretch(memory.now - base, memory.peak - base)
    del weight, last
    return ahead, back


def _split_way_back(
    memory: Memory, sizes: BlockSizes, head: HeadSizes, grad: list[Piece], saved: Saved
) -> tuple[Stretch, Stretch]:
    """Backward to the last block, and then the gradients of the weights behind it."""
    base = memory.now
    later: Saved = {}
    # The graph stays, so what forward has computed is scaled into memory of its own.
    grads = [memory.new(sizes.whole)]
    unused = memory.new(head.weight)
    del unused
    grads = [summed(memory, sizes, grads)]
    last = norm_backward(memory, sizes, grads, dict(saved), "norm", later)
    inputs = Stretch(memory.now - base, memory.peak - base)
    base = memory.peak = memory.now
    for each in norm_weight(memory, saved, "norm", later) if later else ():
        del saved[each]
    grad.clear()
    saved.clear()
    weights = Stretch(memory.now - base, memory.peak - base)
    del last
    return inputs, weights


def _chunk(memory: Memory, sizes: BlockSizes, head: HeadSizes, before: Piece | None) -> Piece | None:
    """One chunk's logits and their gradient, which stays until the next chunk has its own."""
    chunk, sums = min(head.chunk_tokens, sizes.tokens), sizes.wide * head.itemsize
    rows = memory.new(chunk * (INT64 + 3 * sums))
    whole = None
    if head.gathered:
        sent = memory.new(chunk * head.own * head.itemsize)
        whole = memory.new(chunk * head.gathered * head.itemsize)
        del sent
    grad = whole
    if head.itemsize < sums:
        wide = memory.new(chunk * (head.vocab_size if head.gathered else head.own) * sums)
        del grad, whole
        grad = memory.new(chunk * head.own * head.itemsize)
        del wide
    del before, rows
    scaled = memory.new(chunk * head.row if head.weight else 0)
    del scaled
    return grad
