"""Works out what each part of a rank's model does to memory: a block, the embedding, the loss."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import NamedTuple

import torch

from parallel.activation_checkpoint import ATTENTION, POLICIES, REDUCTIONS
from parallel.config import ParallelConfig
from parallel.ledger import ends_memory
from parallel.ledger.block_backward import backward
from parallel.ledger.block_gradients import BlockGradients, block_gradients, gradients_behind
from parallel.ledger.block_memory import forward
from parallel.ledger.block_sizes import BatchShape, BlockSizes, block_sizes, itemsizes
from parallel.ledger.ends_memory import HeadSizes, Stretch
from parallel.ledger.norm_memory import Saved
from parallel.ledger.parts import ModelParts
from parallel.ledger.pieces import Memory, Piece
from parallel.ledger.unit_memory import elements

Kept = frozenset[str] | None
"""Which results a block keeps for backward. None: all that backward needs."""


class Borrowed(NamedTuple):
    """What a block is given that others hold until it is done, as a pipeline does what it has received.

    Attributes:
        stream: Whether the stream before it, in forward and backward.
        gradient: Whether the gradient of the stream after it.
    """

    stream: bool = False
    gradient: bool = False


OWN = Borrowed()
"""A block lets go of all that it is given."""


class _Passing(list[Piece]):
    """Holds nothing of what is put in."""

    def append(self, piece: Piece) -> None:
        """Lets go of it."""


class Stretches:
    """What parts of a rank's model do to memory in a micro-batch.

    Attributes:
        sizes: Of any block.
        kept: Which results a checkpointed block keeps.
        tables: Bytes of the rotary tables.
    """

    def __init__(self, parts: ModelParts, batch: BatchShape, coordinates: Mapping[str, int]) -> None:
        """Works out sizes.

        Args:
            parts: The rank's part of the model.
            batch: What the rank is given.
            coordinates: Place of the rank along `cp` and `tp`, from 0.
        """
        self._parts, self._batch, self._tp_rank = parts, batch, coordinates["tp"]
        self.sizes: BlockSizes = block_sizes(parts, batch, coordinates["cp"], coordinates["tp"])
        # A policy may count matmuls, and those of adapters are among them.
        self.kept: Kept = kept_results(parts.config, tuple(name for name, _ in self.sizes.gradients.adapters))
        _, self._itemsize, sums, _ = itemsizes(parts)
        self.tables = 2 * self.sizes.tokens * (parts.whole.shape.head_dim // 2) * sums
        self._gradients = [block_gradients(parts, index, self._tp_rank) for index in range(len(parts.plan.blocks))]
        self._blocks: dict[tuple[Kept, BlockGradients, bool, Borrowed], tuple[Stretch, Stretch]] = {}

    def block(self, index: int, *, keeps_gradients: bool, borrowed: Borrowed = OWN) -> tuple[Stretch, Stretch]:
        """Forward of a block, and its backward, computing again included.

        Args:
            index: Its place among the rank's blocks.
            keeps_gradients: Whether those of weights stay where they were made until it is done.
            borrowed: What others hold.
        """
        every = self._parts.config.activation_checkpoint_every
        gradients = self._gradients[index]
        # Autograd keeps nothing of a block that nothing trained comes before, checkpointed or not.
        kept = self.kept if index % every == 0 and "out" in gradients.followed else None
        key = (kept, gradients, keeps_gradients, borrowed)
        if key not in self._blocks:
            self._blocks[key] = self._block(*key, self.gradients_of(index))
        return self._blocks[key]

    def embedding(self, *, keeps_gradient: bool) -> tuple[Stretch, Stretch]:
        """Forward and backward of the embedding.

        Args:
            keeps_gradient: Whether that of the table stays where it was made.
        """
        ahead, table = ends_memory.embed(self.sizes), self._bytes_of("embed.weight", trained=True)
        if not table:
            # Nothing before the blocks is trained, so no gradient goes further.
            return ahead, Stretch(0, 0)
        return ahead, ends_memory.embed_backward(self.sizes, table, keeps_gradient=keeps_gradient)

    @cached_property
    def loss(self) -> tuple[Stretch, Stretch]:
        """From the last block to the loss, and back."""
        config, shape = self._parts.config, self._parts.whole.shape
        name = "head.weight" if self._bytes_of("head.weight") else "embed.weight"
        weight = self._bytes_of(name)
        gathers = config.tp > 1 and not config.loss_parallel
        head = HeadSizes(
            chunk_tokens=self._batch.chunk_tokens,
            own=weight // (shape.width * self._itemsize),
            gathered=-(-shape.vocab_size // config.tp) * config.tp if gathers else 0,
            vocab_size=shape.vocab_size,
            itemsize=self._itemsize,
            weight=self._bytes_of(name, trained=True),
            row=shape.width * self._itemsize,
        )
        norm = self._bytes_of("norm.weight", trained=True)
        sizes = replace(self.sizes, gradients=gradients_behind(self._gradients[-1], norm_is_trained=norm > 0))
        ahead, back = ends_memory.loss(sizes, head)
        return ahead, back._replace(held=back.held + norm)

    @property
    def turns_back(self) -> bool:
        """Whether gradients of queries or keys are turned back somewhere."""
        return any(each.followed & {"q norm", "k norm"} for each in self._gradients)

    def gradients_of(self, index: int) -> int:
        """Bytes of a block's gradients as backward makes them.

        Args:
            index: Its place among the rank's blocks.
        """
        start = f"{self._parts.plan.blocks[index].fqn}."
        own = [each for each in self._parts.parameters if each.fqn.startswith(start) and each.trainable]
        return elements(own, self._parts.config, self._tp_rank) * self._itemsize

    def _bytes_of(self, fqn: str, *, trained: bool = False) -> int:
        own = [each for each in self._parts.parameters if each.fqn == fqn and (each.trainable or not trained)]
        return elements(own, self._parts.config, self._tp_rank) * self._itemsize

    def _block(
        self, kept: Kept, gradients: BlockGradients, keeps_gradients: bool, borrowed: Borrowed, trained: int
    ) -> tuple[Stretch, Stretch]:
        memory, sizes = Memory(), replace(self.sizes, gradients=gradients)
        stream = [memory.new(sizes.stream)]
        elsewhere = stream.copy() if borrowed.stream else []
        base = memory.now
        results: Saved = {}
        out, saved = forward(memory, sizes, stream[0], kept=kept, cache=results)
        if kept is None:
            stream.clear()
        ahead = Stretch(memory.now - base, memory.peak - base)
        if "out" not in gradients.followed:
            return ahead, Stretch(0, 0)
        grads = [memory.new(sizes.stream)]
        elsewhere += grads if borrowed.gradient else []
        base = memory.peak = memory.now
        if kept is not None:
            saved = forward(memory, sizes, stream[0], kept=kept, cache=results, again=True)[1]
        weights: list[Piece] = [] if keeps_gradients else _Passing()
        backward(memory, sizes, grads, saved, weights)
        for each in (stream, results, saved):
            each.clear()
        # Those of norms and biases are few.
        held = memory.now - base - sum(each.num_bytes for each in weights) + trained
        back = Stretch(held, memory.peak - base)
        del out, elsewhere
        return ahead, back


_ORDER = ("q", "k", "v", "attention", "o", "gate", "up", "down")


@cache
def kept_results(config: ParallelConfig, adapters: tuple[str, ...] = ()) -> Kept:
    """Which results a checkpointed block of a dense model keeps, by the names of its projections and `attention`.

    Args:
        config: The layout.
        adapters: Projections that have one, whose matmuls are called `q first` and `q second`.
    """
    if config.activation_checkpointing != "selective":
        return None if config.activation_checkpointing == "none" else frozenset()
    keep = POLICIES[config.activation_checkpoint_policy]()
    kept: list[str] = []
    names = [[each, *((f"{each} first", f"{each} second") if each in adapters else ())] for each in _ORDER]
    for name in (each for own in names for each in own):
        # Of what ranks add up the sum is kept, if anything.
        is_sum = config.tp > 1 and name in ("o", "down", "o first", "down first")
        ops = ATTENTION if name == "attention" else REDUCTIONS if is_sum else {torch.ops.aten.mm.default}
        if all(keep(op, (None, None)) for op in ops):
            kept.append(name)
    return frozenset(kept)
