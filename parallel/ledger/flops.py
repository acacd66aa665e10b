"""Floating-point operations that training a model takes per token, by each convention in use."""

from typing import Literal, get_args

from parallel.plan import ModelShape

FlopConvention = Literal["full_attention", "all_parameters", "causal"]
"""How FLOPs are counted, see `training_flops_per_token`."""


def num_parameters(shape: ModelShape, *, num_experts: int | None = None) -> int:
    """Matrices, embeddings and norms of a model; biases and norms of heads, which hardly count, are left out.

    Args:
        shape: Counts and widths.
        num_experts: Experts of a layer that count. None: all.
    """
    attention = shape.width * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    num_sparse = shape.num_layers - shape.num_dense_layers if shape.num_experts else 0
    expert_width = shape.feed_forward_width if shape.expert_width is None else shape.expert_width
    experts = (shape.num_experts if num_experts is None else num_experts) * expert_width + shape.shared_expert_width
    feed_forward = (shape.num_layers - num_sparse) * 3 * shape.width * shape.feed_forward_width
    feed_forward += num_sparse * shape.width * (3 * experts + shape.num_experts)
    num_embeddings = 1 if shape.tied_embeddings else 2
    return (
        shape.num_layers * (attention + 2 * shape.width)
        + feed_forward
        + num_embeddings * shape.vocab_size * shape.width
        + shape.width
    )


def training_flops_per_token(shape: ModelShape, sequence_length: int, convention: FlopConvention) -> int:
    """FLOPs of forward and backward for one token, those that a backward computes again left out.

    A multiplication and an addition count as two. Each parameter that is multiplied takes 2 in forward and 4 in
    backward; attention to a sequence of s tokens takes 12 heads x head_dim x s in each layer, or half of it where
    only what causal masks leave is counted. Documents that share a sequence count as one. Of experts those count that a
    token is sent to.

    - `full_attention`: 6 (parameters - lookup table) + 12 layers x heads x head_dim x s. The table of the embedding
      is looked up, not multiplied; where head and embedding are tied, the one matrix counts for the head.
    - `all_parameters`: 6 parameters + 12 layers x heads x head_dim x s.
    - `causal`: 6 (parameters - lookup table) + 6 layers x heads x head_dim x s.

    Args:
        shape: Counts and widths.
        sequence_length: Tokens of a sequence.
        convention: What is counted.

    Raises:
        ValueError: If the convention is unknown.

    Source: Chowdhery et al. 2022, "PaLM", appendix B, for `all_parameters` and the attention term; Dao 2023,
    "FlashAttention-2", section 4, for the causal half.
    """
    if convention not in get_args(FlopConvention):
        raise ValueError(f"unknown FLOP convention {convention!r}; legal: {', '.join(get_args(FlopConvention))}")
    lookup = 0 if shape.tied_embeddings or convention == "all_parameters" else shape.vocab_size * shape.width
    per_layer = (6 if convention == "causal" else 12) * shape.num_heads * shape.head_dim * sequence_length
    return 6 * (num_parameters(shape, num_experts=shape.num_experts_per_token) - lookup) + shape.num_layers * per_layer


def recomputed_flops_per_token(
    shape: ModelShape, sequence_length: int, convention: FlopConvention, kept: frozenset[str] | None, *, every: int = 1
) -> int:
    """FLOPs that backward computes again for one token of a dense model; hardware counts them, the model does not.

    The last matmul of a block is never computed again: nothing in backward needs what it gave.

    Args:
        shape: Counts and widths.
        sequence_length: Tokens of a sequence.
        convention: What is counted of attention.
        kept: Results that checkpointed blocks keep, by the names of projections and `attention`. None: all.
        every: One of so many blocks is checkpointed, the first one and on.
    """
    if kept is None:
        return 0
    queries, keys = (count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads))
    hidden = shape.feed_forward_width
    widths = {"q": queries, "k": keys, "v": keys, "o": queries, "gate": hidden, "up": hidden}
    matmuls = 2 * shape.width * sum(width for name, width in widths.items() if name not in kept)
    attention = (2 if convention == "causal" else 4) * queries * sequence_length * ("attention" not in kept)
    return -(-shape.num_layers // every) * (matmuls + attention)


def utilization(flops_per_token: float, tokens_per_s: float, peak_flops_per_s: float, num_devices: int) -> float:
    """The share of what the devices could compute that went into the model (MFU), or that they did compute (HFU).

    Args:
        flops_per_token: As `training_flops_per_token` gives them, for HFU with `recomputed_flops_per_token`.
        tokens_per_s: Tokens that all devices together train on in a second.
        peak_flops_per_s: Peak of one device.
        num_devices: Devices that train.
    """
    return flops_per_token * tokens_per_s / (peak_flops_per_s * num_devices)
