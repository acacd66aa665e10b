"""Works out how large the tensors of a block are on one rank."""

from dataclasses import dataclass
from math import prod

from parallel.config import ContextParallelMethod
from parallel.context_parallel import sent_kv_heads
from parallel.ledger.block_gradients import PROJECTIONS, BlockGradients, LowRank, block_gradients
from parallel.ledger.expert_memory import ExpertSizes
from parallel.ledger.lookup import by_block
from parallel.ledger.optimizer_memory import Kernels
from parallel.ledger.parts import ModelParts, is_unit_based


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """What a rank is given in a step.

    Attributes:
        num_micro_batches: Its micro-batches.
        micro_batch: Sequences of one.
        sequence_length: Tokens of a sequence, whole.
        has_documents: Whether attention keeps documents apart, which takes a mask.
        chunk_tokens: Tokens whose logits the loss holds at a time.
        optimizer: One of `OPTIMIZERS`.
        optimizer_kernels: How it steps.
        decays: Whether it decays weights.
        expert_rows: Rows of a micro-batch that come to the experts of this rank in each layer. None: as many as it
            sends, which is an even load.
    """

    num_micro_batches: int
    micro_batch: int
    sequence_length: int
    has_documents: bool
    chunk_tokens: int = 256
    optimizer: str = "adamw"
    optimizer_kernels: Kernels = "fused"
    decays: bool = True
    expert_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Bytes of one rank's tensors in a block, in the dtype of the computation unless said otherwise.

    Attributes:
        tokens: Tokens of the rank in a micro-batch, of which `tp` may split the stream further.
        stream: Residual stream, this rank's tokens.
        whole: The same with the tokens of all ranks of `tp`.
        queries: Queries of the rank's heads; what attention gives has that size too.
        keys: Keys of its heads; values have that size too.
        hidden: Between the projections of the feed-forward layer.
        scores: Log-sum-exps of attention.
        later_steps: What a ring's attention gives in all its steps but the first.
        exchanged: Queries, keys and values as ulysses sends them.
        all_keys: Keys and values of whole sequences.
        seen_keys: Those of them up to the rank's last token.
        mask: What attention adds to scores where there are documents, or more keys than queries.
        flags: The bools that it is made of, which all blocks share.
        rows: One number for each token of the stream, in the dtype of sums.
        head_rows: One for each token and query head; None: heads are not normalized.
        wide: Bytes of sums over those of the computation: 2 for bfloat16, else 1.
        writes_out_norms: Whether norms of the stream keep their input and one number a row.
        writes_out_head_norms: The same of norms of heads.
        splits: Whether `tp` splits the matrices.
        splits_stream: Whether it splits the stream too.
        method: How attention sees whole sequences.
        weights: Of the projections, by name.
        itemsize: Of one element.
        gradients: Where gradients flow in the block.
        experts: Of the experts in it. None: its feed-forward layer is a dense one.
    """

    tokens: int
    stream: int
    whole: int
    queries: int
    keys: int
    hidden: int
    scores: int
    later_steps: int
    exchanged: int
    all_keys: int
    seen_keys: int
    mask: int
    flags: int
    rows: int
    head_rows: int | None
    wide: int
    writes_out_norms: bool
    writes_out_head_norms: bool
    splits: bool
    splits_stream: bool
    method: ContextParallelMethod | None
    weights: dict[str, int]
    itemsize: int
    gradients: BlockGradients
    experts: ExpertSizes | None

    def low(self, adapter: LowRank) -> int:
        """Bytes between the two matrices of an adapter.

        Args:
            adapter: Of a projection that reads whole sequences.
        """
        return self.tokens * adapter.rank * self.itemsize


def itemsizes(parts: ModelParts) -> tuple[int, int, int, int]:
    """Bytes of an element as it is stored, in the computation, in its sums, and as gradients are summed over ranks.

    Args:
        parts: The rank's part of the model.
    """
    stored, precision = parts.parameters[0].dtype, parts.config.precision
    compute = precision.compute_dtype or stored
    reduce = precision.reduce_dtype or compute
    return stored.itemsize, compute.itemsize, max(compute.itemsize, 4), reduce.itemsize


def runs_on_copies(parts: ModelParts) -> bool:
    """Whether all parameters are copied into the dtype of the computation for each forward, because no unit does it.

    Args:
        parts: The rank's part of the model.
    """
    stored, compute, *_ = itemsizes(parts)
    return compute != stored and not is_unit_based(parts.config)


def block_sizes(parts: ModelParts, batch: BatchShape, cp_rank: int, tp_rank: int) -> BlockSizes:
    """Sizes in the first block of a rank of a dense decoder; others differ in nothing but where gradients flow.

    Args:
        parts: The rank's part of the model, with a block or more.
        batch: What the rank is given.
        cp_rank: Place of the rank along `cp`.
        tp_rank: Place of the rank along `tp`.
    """
    config, shape = parts.config, parts.whole.shape
    _, itemsize, sums, _ = itemsizes(parts)
    own = batch.sequence_length // config.cp
    tokens = batch.micro_batch * own
    splits_stream = config.tp > 1 and config.sequence_parallel
    split = config.tp if splits_stream else 1
    heads, kv_heads = shape.num_heads // config.tp, shape.num_kv_heads // config.tp
    head = tokens * shape.head_dim * itemsize
    # All queries see the keys of earlier ranks, half of them those of later ones.
    halves = config.cp - 1 + cp_rank if config.cp_method == "ring" else 0
    specs = {each.fqn: each for each in parts.parameters}
    fqn = parts.plan.blocks[0].fqn
    mask, flags = _masks(config.cp_method, config.cp, cp_rank, batch)
    return BlockSizes(
        tokens=tokens,
        stream=tokens // split * shape.width * itemsize,
        whole=tokens * shape.width * itemsize,
        queries=heads * head,
        keys=kv_heads * head,
        hidden=tokens * (shape.feed_forward_width // config.tp) * itemsize,
        scores=tokens * heads * sums,
        later_steps=(heads * head + tokens * heads * sums) // 2 * halves,
        exchanged=(heads + 2 * sent_kv_heads(kv_heads, config.cp)) * head,
        all_keys=2 * kv_heads * head * config.cp,
        seen_keys=2 * kv_heads * head * (cp_rank + 1),
        mask=mask * itemsize,
        flags=flags,
        rows=tokens // split * sums,
        head_rows=tokens * heads * sums if f"{fqn}.attention.q_norm.weight" in specs else None,
        wide=sums // itemsize,
        writes_out_norms=itemsize == sums and not splits_stream,
        writes_out_head_norms=itemsize == sums and config.tp == 1,
        splits=config.tp > 1,
        splits_stream=splits_stream,
        method=config.cp_method,
        weights={
            name: prod(specs[weight].split(config.tp, tp_rank)) * itemsize
            for name, module in PROJECTIONS.items()
            for block in parts.plan.blocks
            if (weight := f"{block.fqn}.{module}.weight") in specs
        },
        itemsize=itemsize,
        gradients=block_gradients(parts, 0, tp_rank),
        experts=None,
    )


def expert_sizes(parts: ModelParts, batch: BatchShape, sizes: BlockSizes, index: int, tp_rank: int) -> ExpertSizes:
    """Sizes of the experts of a block.

    Args:
        parts: The rank's part of the model.
        batch: What the rank is given.
        sizes: Of any block.
        index: Number of the block among the rank's.
        tp_rank: Place of the rank along `tp`.
    """
    config, shape, fqn = parts.config, parts.whole.shape, parts.plan.blocks[index].fqn
    within = f"{fqn}.feed_forward"
    specs = by_block(parts)[fqn]
    rows = sizes.tokens * shape.num_experts_per_token
    gate, router = (specs[f"{within}.{name}"] for name in ("experts.gate_proj", "router.weight"))
    own = gate.split(config.tp, tp_rank)
    return ExpertSizes(
        tokens=sizes.tokens,
        experts=shape.num_experts,
        rows=rows,
        # As many from each rank of `ep` as it sends in all: an even load.
        arrived=rows if batch.expert_rows is None else batch.expert_rows,
        row=shape.width * sizes.itemsize,
        hidden=own[-1] * sizes.itemsize,
        itemsize=sizes.itemsize,
        sum_itemsize=sizes.wide * sizes.itemsize,
        matrix=prod(own) * sizes.itemsize,
        router=prod(router.split(config.tp, tp_rank)) * sizes.itemsize,
        travels=config.ep > 1,
        drops=bool(parts.plan.of_whole_rows),
        has_bias=f"{within}.router.selection_bias" in specs,
        shared=sizes.tokens * (shape.shared_expert_width // config.tp) * sizes.itemsize,
    )


def _masks(method: ContextParallelMethod | None, cp: int, cp_rank: int, batch: BatchShape) -> tuple[int, int]:
    """Elements of what attention adds to the scores of one block, and of the bools that all blocks share."""
    own, whole = batch.sequence_length // cp, batch.sequence_length
    if not batch.has_documents:
        # What is causal needs a mask where there are more keys than queries, one for all sequences.
        return (own * own * (cp_rank + 1) if method == "allgather" and cp_rank else 0), 0
    if method == "ring":
        # Of each later step half of the square can be seen.
        square = batch.micro_batch * own * own
        return square, square + (cp - 1) * square // 2
    pairs = own * own * (cp_rank + 1) if method == "allgather" else whole * whole
    return batch.micro_batch * pairs, batch.micro_batch * pairs
