"""Says what attention holds between its projections, on one rank and with each method of context parallel."""

from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.norm_memory import head_norm_backward, head_norm_forward
from parallel.ledger.pieces import Memory, Piece, Saved
from parallel.ledger.results import Results


def attend(memory: Memory, sizes: BlockSizes, make: Results, saved: Saved | None) -> tuple[Piece, ...]:
    """From the input of q, k and v to that of the projection behind.

    Args:
        memory: Where it runs.
        sizes: Of the block.
        make: Gives the result of an op by name and size.
        saved: Gets what backward will need. None: nothing is kept.

    Returns:
        What the module still holds while that projection runs.
    """
    kept: Saved = {}
    q, k, v = make("q", sizes.queries), make("k", sizes.keys), make("v", sizes.keys)
    if sizes.head_rows is not None:
        q, k = head_norm_forward(memory, sizes, q, kept, "q norm"), head_norm_forward(memory, sizes, k, kept, "k norm")
        if saved is None:
            kept.clear()
    turned_q, turned_k = _turned(memory, sizes, sizes.queries), _turned(memory, sizes, sizes.keys)
    del q, k
    held, inputs = (turned_q, turned_k, v), {"q": turned_q, "k": turned_k, "v": v}
    del turned_q, turned_k, v
    sent: Piece | None = None
    if sizes.method == "ulysses":
        sent = memory.new(sizes.exchanged)
        inputs = {"q": _exchanged(memory, sizes.exchanged)}
    elif sizes.method == "allgather":
        sent = memory.new(2 * sizes.keys)
        arrived = memory.new(sizes.all_keys)
        inputs = {"q": inputs["q"], "k": memory.new(sizes.all_keys)}
        del arrived
    mask = memory.new(sizes.mask)
    make.aside("attention", sizes.later_steps)
    out = make("attention", sizes.queries + sizes.scores)
    if sizes.method != "ring":
        inputs["mask"] = mask
    del mask
    inputs["out"] = out
    back = _exchanged(memory, sizes.queries) if sizes.method == "ulysses" else out
    inputs["back"] = back
    del sent
    if not sizes.gradients.keeps_input("o"):
        inputs.pop("back", None)
    if "attention" not in sizes.gradients.followed:
        inputs = {name: each for name, each in inputs.items() if name == "back"}
        kept.clear()
    if saved is not None:
        saved.update(inputs)
        saved.update(kept)
    return (*held, back)


def attend_backward(
    memory: Memory, sizes: BlockSizes, grads: list[Piece], saved: Saved, later: Saved | None = None
) -> None:
    """From the gradient of what the projection behind reads to those of what q, k and v give.

    Args:
        memory: Where it runs.
        sizes: Of the block.
        grads: Holds the one, and then the three.
        saved: What forward kept; taken out of it.
        later: Gets what gradients of weights are to be computed from later. None: they are computed at once.
    """
    if sizes.method == "ulysses":
        saved.pop("back", None)
        grads[0] = _exchanged(memory, sizes.queries)
    mask = memory.new(sizes.mask) if sizes.method == "ring" else None
    seen = {"allgather": sizes.seen_keys, "ulysses": sizes.exchanged - sizes.queries}
    values = seen.get(sizes.method or "", 2 * sizes.keys) // 2
    inner = [memory.new(sizes.queries), memory.new(values), memory.new(values)]
    del mask
    grads.clear()
    for name in ("q", "k", "v", "out", "back", "mask"):
        saved.pop(name, None)
    _back_to_own_tokens(memory, sizes, inner)
    for index, name, size in ((1, "k norm", sizes.keys), (0, "q norm", sizes.queries)):
        inner[index] = _turned(memory, sizes, size) if name in sizes.gradients.followed else memory.new(0)
    if sizes.head_rows is not None:
        for index, name in ((1, "k norm"), (0, "q norm")):
            if name not in sizes.gradients.followed:
                continue
            own = [inner[index]]
            inner[index] = memory.new(0)
            inner[index] = head_norm_backward(memory, sizes, own, saved, name, later)
    grads.extend(inner)


def _back_to_own_tokens(memory: Memory, sizes: BlockSizes, inner: list[Piece]) -> None:
    """Brings gradients to the ranks whose queries, keys and values they are of."""
    if sizes.method == "ulysses":
        together = memory.new(sizes.exchanged)
        inner.clear()
        together = _exchanged(memory, sizes.exchanged)
        inner.extend(memory.new(each) for each in (sizes.queries, sizes.keys, sizes.keys))
        del together
    elif sizes.method == "allgather":
        both = memory.new(sizes.seen_keys)
        del inner[1:]
        both = memory.new(sizes.all_keys)
        ordered = memory.new(sizes.all_keys)
        inner += [memory.new(sizes.keys), memory.new(sizes.keys)]
        del ordered, both


def _exchanged(memory: Memory, num_bytes: int) -> Piece:
    """What an exchange of heads and tokens brings: put in order before, received, and put in order after."""
    ordered = memory.new(num_bytes)
    received = memory.new(num_bytes)
    del ordered
    own = memory.new(num_bytes)
    del received
    return own


def _turned(memory: Memory, sizes: BlockSizes, num_bytes: int) -> Piece:
    """Turned queries or keys, in the dtype that they came in; the turn itself is computed in that of sums."""
    if sizes.wide == 1:
        return memory.new(num_bytes)
    copied, turned = memory.new(num_bytes * sizes.wide), memory.new(num_bytes * sizes.wide)
    narrow = memory.new(num_bytes)
    del copied, turned
    return narrow
