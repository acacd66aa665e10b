"""Works out what each part of a rank's model does to memory: a block, the embedding, the loss."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property

import torch

from parallel.activation_checkpoint import ATTENTION, POLICIES, REDUCTIONS
from parallel.config import ParallelConfig
from parallel.ledger import ends_memory
from parallel.ledger.block_gradients import BlockGradients, block_gradients, gradients_behind
from parallel.ledger.block_run import OWN, Borrowed, Kept
from parallel.ledger.block_sizes import BatchShape, BlockSizes, block_sizes, expert_sizes, itemsizes, runs_on_copies
from parallel.ledger.block_stretches import split_block, whole_block
from parallel.ledger.ends_memory import HeadSizes, Stretch
from parallel.ledger.expert_memory import ExpertSizes
from parallel.ledger.lookup import by_block
from parallel.ledger.padding import elements
from parallel.ledger.parts import ModelParts
from parallel.ledger.split_backward import SplitBackward


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
        self.kept: Kept = kept_results(parts.config)
        _, self._itemsize, sums, _ = itemsizes(parts)
        self.tables = 2 * self.sizes.tokens * (parts.whole.shape.head_dim // 2) * sums
        self._gradients = [block_gradients(parts, index, self._tp_rank) for index in range(len(parts.plan.blocks))]
        self._blocks: dict[tuple[_Key, int], tuple[Stretch, Stretch]] = {}
        self._split: dict[tuple[_Key, bool], SplitBackward] = {}
        self._copies = runs_on_copies(parts)

    def block(
        self, index: int, *, keeps_gradients: bool, borrowed: Borrowed = OWN, own_copies: int = 0
    ) -> tuple[Stretch, Stretch]:
        """Forward of a block, and its backward, computing again included.

        Args:
            index: Its place among the rank's blocks.
            keeps_gradients: Whether those of weights stay where they were made until it is done.
            borrowed: What others hold.
            own_copies: Bytes of the copies of its parameters that it makes itself.
        """
        key = self._key(index, keeps_gradients, borrowed), own_copies
        if key not in self._blocks:
            kept, kind, *_ = key[0]
            self._blocks[key] = whole_block(
                self._sizes(kind),
                kept,
                borrowed,
                self._copied(kind[1]),
                own_copies,
                keeps_gradients=keeps_gradients,
                trained=self.gradients_of(index),
            )
        return self._blocks[key]

    def split_block(
        self, index: int, *, keeps_gradients: bool, borrowed: Borrowed = OWN, is_top: bool = False
    ) -> SplitBackward:
        """Backward of a block in two parts.

        Args:
            index: Its place among the rank's blocks.
            keeps_gradients: Whether those of weights stay where they were made.
            borrowed: What others hold.
            is_top: Whether no weight behind it is trained.
        """
        key = self._key(index, keeps_gradients, borrowed), is_top
        if key not in self._split:
            kept, kind, *_ = key[0]
            self._split[key] = split_block(
                self._sizes(kind),
                kept,
                borrowed,
                keeps_gradients=keeps_gradients,
                trained=self.gradients_of(index),
                is_top=is_top,
            )
        return self._split[key]

    def _key(self, index: int, keeps_gradients: bool, borrowed: Borrowed) -> "_Key":
        every = self._parts.config.activation_checkpoint_every
        gradients = self._gradients[index]
        # Autograd keeps nothing of a block that nothing trained comes before, checkpointed or not.
        kept = self._kept_in(index) if index % every == 0 and "out" in gradients.followed else None
        experts = None
        if self._parts.plan.blocks[index].has_experts:
            experts = expert_sizes(self._parts, self._batch, self.sizes, index, self._tp_rank)
        return kept, (gradients, experts), keeps_gradients, borrowed

    def _kept_in(self, index: int) -> Kept:
        """What a checkpointed block keeps; a policy may count matmuls, and those of adapters are among them."""
        adapters = tuple(name for name, _ in self._gradients[index].adapters)
        return kept_results(self._parts.config, adapters, routes=self._parts.plan.blocks[index].has_experts)

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
        ahead, back = ends_memory.loss(self._behind, self._head)
        return ahead, back._replace(held=back.held + self._last_norm)

    @cached_property
    def split_loss(self) -> SplitBackward:
        """The way back from the loss in two parts."""
        _, inputs, weights = ends_memory.loss(self._behind, self._head, splits=True)
        if not self.trains_behind:
            return SplitBackward(inputs, Stretch(0, 0), passed=-weights.held)
        return SplitBackward(inputs, weights._replace(held=weights.held + self._last_norm))

    @property
    def trains_behind(self) -> bool:
        """Whether the last norm or the head is trained."""
        return self._last_norm + self._head.weight > 0

    def trains(self, index: int) -> bool:
        """Whether anything of a block is trained.

        Args:
            index: Its place among the rank's blocks.
        """
        return bool(self._gradients[index].trained or self._gradients[index].adapters)

    @property
    def _head(self) -> HeadSizes:
        config, shape = self._parts.config, self._parts.whole.shape
        name = "head.weight" if self._bytes_of("head.weight") else "embed.weight"
        weight = self._bytes_of(name)
        gathers = config.tp > 1 and not config.loss_parallel
        return HeadSizes(
            chunk_tokens=self._batch.chunk_tokens,
            own=weight // (shape.width * self._itemsize),
            gathered=-(-shape.vocab_size // config.tp) * config.tp if gathers else 0,
            vocab_size=shape.vocab_size,
            itemsize=self._itemsize,
            weight=self._bytes_of(name, trained=True),
            row=shape.width * self._itemsize,
        )

    @property
    def _last_norm(self) -> int:
        return self._bytes_of("norm.weight", trained=True)

    @property
    def _behind(self) -> BlockSizes:
        """Sizes as of a block, of what is behind all of them."""
        gradients = gradients_behind(self._gradients[-1], norm_is_trained=self._last_norm > 0)
        return replace(self.sizes, gradients=gradients)

    @property
    def turns_back(self) -> bool:
        """Whether gradients of queries or keys are turned back somewhere."""
        return any(each.followed & {"q norm", "k norm"} for each in self._gradients)

    def gradients_of(self, index: int) -> int:
        """Bytes of a block's gradients as backward makes them.

        Args:
            index: Its place among the rank's blocks.
        """
        block = by_block(self._parts)[self._parts.plan.blocks[index].fqn]
        own = [each for each in block.values() if each.has_gradient]
        return elements(own, self._parts.config, self._tp_rank) * self._itemsize

    def _bytes_of(self, fqn: str, *, trained: bool = False) -> int:
        around = by_block(self._parts).get(fqn.rpartition(".")[0], {})
        own = [each for each in around.values() if each.fqn == fqn and (each.has_gradient or not trained)]
        return elements(own, self._parts.config, self._tp_rank) * self._itemsize

    def _sizes(self, kind: "_Kind") -> BlockSizes:
        return replace(self.sizes, gradients=kind[0], experts=kind[1])

    def _copied(self, experts: ExpertSizes | None) -> dict[str, int]:
        """Matrices of a block that are used in a copy, and the bytes of each."""
        ends = ("gate", "up", "down") if experts is not None else ()
        own = self.sizes.weights.items() if self._copies else ()
        return {name: size for name, size in own if name not in ends}


_Kind = tuple[BlockGradients, ExpertSizes | None]
_Key = tuple[Kept, _Kind, bool, Borrowed]

_ORDER = ("q", "k", "v", "attention", "o", "router", "gate", "up", "down")


@cache
def kept_results(config: ParallelConfig, adapters: tuple[str, ...] = (), *, routes: bool = False) -> Kept:
    """Which results a checkpointed block of a dense model keeps, by the names of its projections and `attention`.

    Args:
        config: The layout.
        adapters: Projections that have one, whose matmuls are called `q first` and `q second`.
        routes: Whether a router comes before the feed-forward layer, which is one of experts.
    """
    if config.activation_checkpointing != "selective":
        return None if config.activation_checkpointing == "none" else frozenset()
    keep = POLICIES[config.activation_checkpoint_policy]()
    kept: list[str] = []
    order = [each for each in _ORDER if each != "router" or routes]
    names = [[each, *((f"{each} first", f"{each} second") if each in adapters else ())] for each in order]
    for name in (each for own in names for each in own):
        # Of what ranks add up the sum is kept, if anything.
        is_sum = config.tp > 1 and name in ("o", "down", "o first", "down first")
        ops = ATTENTION if name == "attention" else REDUCTIONS if is_sum else {torch.ops.aten.mm.default}
        if all(keep(op, (None, None)) for op in ops):
            kept.append(name)
    return frozenset(kept)
