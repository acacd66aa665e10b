"""Says what a block of a dense decoder holds while it runs forward, tensor by tensor.

The order in which tensors come and go is that of the models' layers on a CPU, where norms of float32 are written out
and others are composed of elementary operators.
"""

from collections.abc import Collection

from parallel.ledger.attention_memory import attend
from parallel.ledger.block_sizes import BlockSizes
from parallel.ledger.expert_memory import ExpertLayer, ExpertSizes
from parallel.ledger.norm_memory import gathered, norm_forward
from parallel.ledger.pieces import Memory, Piece, Saved
from parallel.ledger.results import Results


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
    make = Results(memory, sizes, kept or (), cache, saved if hold else None, again=again)

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
        written = make.write("o")
        del inputs, out
        return written

    def experts(x: Piece, own: ExpertSizes) -> Piece:
        inputs = read(x, "feed-forward", ("router",))
        written = ExpertLayer(memory, own, gradients).forward(make, sizes.whole, saved if hold else None)
        del inputs
        return written

    def second(x: Piece) -> Piece | None:
        if sizes.experts is not None:
            return experts(x, sizes.experts)
        inputs = read(x, "feed-forward", ("gate", "up"))
        gate, up = make("gate", sizes.hidden), make("up", sizes.hidden)
        hidden = memory.new(sizes.hidden)
        if hold and "hidden" in gradients.followed:
            saved.update(gate=gate, up=up)
        if hold and gradients.keeps_input("down"):
            saved.update(hidden=hidden)
        del gate, up
        written = make.write("down") if not again or gradients.adapter("down") is not None else None
        del inputs, hidden
        return written

    attended = first(x)
    middle = memory.new(sizes.stream)
    del attended
    fed = second(middle)
    return (x, saved) if fed is None else (memory.new(sizes.stream), saved)
