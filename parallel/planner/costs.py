"""Breaks a model's shape and each way to recompute down into the counts that memory and time depend on."""

from typing import NamedTuple

from parallel.config import ActivationCheckpointing
from parallel.ledger.flops import num_parameters
from parallel.plan import ModelShape

DENSE_TENSORS, ROUTER_TENSORS, SHARED_TENSORS = 9, 1, 3
"""Weights of a block: four of attention, three of the feed-forward layer, to which those of experts are stacked, and
two norms; and what a router and an expert that every token passes add to them."""


class ExpertCosts(NamedTuple):
    """The layers with experts, per layer of the whole model where nothing else is said.

    Attributes:
        share: Of the layers, those that have experts.
        number: Experts of such a layer.
        chosen: Experts that a token is sent to.
        width: Between the projections of one expert.
        shared: Width of the expert that every token passes.
        dense: Between the projections of the feed-forward layers without experts.
        parameters: Elements of routed experts in a layer, on average.
    """

    share: float
    number: int
    chosen: int
    width: int
    shared: int
    dense: int
    parameters: float


class ModelCosts(NamedTuple):
    """Elements of a model by what they are.

    Attributes:
        num_layers: Blocks.
        width: Of the residual stream.
        query_width: Of all queries of a token.
        kv_width: Of all keys of a token, or of all values.
        wide: Between the projections of what a token meets of feed-forward layers, on average over blocks.
        num_heads: Query heads.
        vocab_size: Entries of the vocabulary.
        block: Parameters of a block, on average.
        whole: Those of them that ranks of `tp` do not split: norms and routers.
        tensors: In how many tensors they are, on average.
        embedding: Parameters of the embedding.
        head: Those of the head that are not the embedding's.
        total: Parameters of the model.
        experts: Layers with experts; None: there is none.
        trained: Share of the parameters whose gradients are computed and summed over ranks and that has moments, taken
            to be the same of each part.
    """

    num_layers: int
    width: int
    query_width: int
    kv_width: int
    wide: float
    num_heads: int
    vocab_size: int
    block: float
    whole: float
    tensors: float
    embedding: int
    head: int
    total: int
    experts: ExpertCosts | None
    trained: float = 1.0

    def routed(self, ep: int) -> float:
        """Parameters of routed experts of a block that a rank of `ep` has, on average.

        Args:
            ep: Ranks that share the experts.
        """
        return self.experts.parameters / ep if self.experts is not None else 0.0

    def part_of_block(self, tp: int) -> float:
        """Parameters of a block that a rank of `tp` has, on average.

        Args:
            tp: Ranks that share each matrix.
        """
        return (self.block - self.whole) / tp + self.whole

    @property
    def matmuls(self) -> float:
        """Elements of the matrices of a block that a token meets, on average."""
        routers = 0.0 if self.experts is None else self.experts.share * self.experts.number
        return self.width * (2 * self.query_width + 2 * self.kv_width + 3 * self.wide + routers)


def model_costs(shape: ModelShape, frozen: float = 0.0) -> ModelCosts:
    """The counts of a model.

    Args:
        shape: Counts and widths.
        frozen: Share of the parameters that is not trained.
    """
    total, embedding = num_parameters(shape), shape.vocab_size * shape.width
    head = 0 if shape.tied_embeddings else embedding
    sparse = (shape.num_layers - shape.num_dense_layers) / shape.num_layers if shape.num_experts else 0.0
    width = shape.feed_forward_width if shape.expert_width is None else shape.expert_width
    chosen, shared, dense = shape.num_experts_per_token, shape.shared_expert_width, shape.feed_forward_width
    routed = sparse * 3 * shape.width * shape.num_experts * width
    return ModelCosts(
        num_layers=shape.num_layers,
        width=shape.width,
        query_width=shape.num_heads * shape.head_dim,
        kv_width=shape.num_kv_heads * shape.head_dim,
        wide=(1 - sparse) * dense + sparse * (chosen * width + shared),
        num_heads=shape.num_heads,
        vocab_size=shape.vocab_size,
        block=(total - embedding - head - shape.width) / shape.num_layers,
        whole=shape.width * (2 + sparse * shape.num_experts),
        tensors=DENSE_TENSORS + sparse * (ROUTER_TENSORS + (SHARED_TENSORS if shared else 0)),
        embedding=embedding,
        head=head,
        total=total,
        experts=ExpertCosts(sparse, shape.num_experts, chosen, width, shared, dense, routed) if sparse else None,
        trained=1 - frozen,
    )


class Recompute(NamedTuple):
    """What a block keeps for backward and what backward computes again.

    Kept are elements a token and layer, in units of a width; they are those of this toolkit's own layers, derived by
    going through a block's operations.

    Attributes:
        checkpointing: Field `activation_checkpointing` of the layout.
        policy: Its policy; counts with `selective` only.
        stream: Residual streams that sequence parallel splits.
        gathered: Inputs of matmuls, whole on each rank of `tp`.
        queries: Tensors as wide as all queries.
        keys: Tensors as wide as all keys.
        wide: Tensors of the feed-forward width.
        keeps_attention: Whether attention is not computed again; it then keeps a float32 for each head too.
        keeps_sums: Whether what ranks of `tp` have summed is kept.
        again: Matmuls that run again: those between stream and queries, between stream and keys, and of the
            feed-forward layer.
    """

    checkpointing: ActivationCheckpointing
    policy: str
    stream: int
    gathered: int
    queries: int
    keys: int
    wide: int
    keeps_attention: bool
    keeps_sums: bool
    again: tuple[int, int, int]

    @property
    def name(self) -> str:
        """In a word or two."""
        return f"selective {self.policy}" if self.checkpointing == "selective" else self.checkpointing


_EVERY_SECOND = "every_second_matmul"
KEEP_ALL = Recompute("none", _EVERY_SECOND, 2, 2, 2, 2, 3, True, True, (0, 0, 0))
KEEP_MATMULS = Recompute("selective", "matmuls", 2, 0, 2, 2, 2, True, True, (0, 0, 0))
KEEP_HALF = Recompute("selective", _EVERY_SECOND, 2, 0, 1, 1, 1, True, True, (1, 1, 1))
KEEP_ATTENTION = Recompute("selective", "attention", 2, 0, 1, 0, 0, True, True, (2, 2, 2))
# Computing again stops before the last matmul of a block, of whose result nothing is needed.
KEEP_INPUT = Recompute("full", _EVERY_SECOND, 1, 0, 0, 0, 0, False, False, (2, 2, 2))
RECOMPUTES = (KEEP_ALL, KEEP_MATMULS, KEEP_HALF, KEEP_ATTENTION, KEEP_INPUT)
"""From what keeps most to what keeps least."""

FLOAT32 = 4
BFLOAT16 = 2


def kept_bytes(costs: ModelCosts, kept: Recompute, itemsize: int, tp: int, splits_stream: bool) -> float:
    """Activations that a block keeps for one token.

    Args:
        costs: The model.
        kept: What is kept.
        itemsize: Bytes of an element.
        tp: Ranks that share each matrix.
        splits_stream: Whether they split the residual stream too.
    """
    split = kept.queries * costs.query_width + kept.keys * costs.kv_width + kept.wide * costs.wide
    stream = kept.stream * costs.width
    # A token's input to experts is copied for each that it is sent to.
    copies = 1.0 if costs.experts is None else 1 + costs.experts.share * (costs.experts.chosen - 1) / 2
    whole = kept.gathered * costs.width * copies
    sums = FLOAT32 * costs.num_heads if kept.keeps_attention else 0
    return itemsize * (split / tp + stream / (tp if splits_stream else 1) + whole) + sums / tp
