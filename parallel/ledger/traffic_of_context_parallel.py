"""Predicts what `cp` sends: keys and values, or heads, so that attention sees whole sequences."""

from collections.abc import Iterator
from functools import cache

import torch

from parallel.activation_checkpoint import GATHERS, POLICIES
from parallel.collective_ops import Kind
from parallel.context_parallel import sent_kv_heads
from parallel.counter import Phase
from parallel.ledger.parts import ModelParts
from parallel.ledger.term import Term, channel
from parallel.plan import Block

INT64 = 8


def context_parallel_terms(parts: ModelParts, num_tokens: int) -> Iterator[Term]:
    """Terms of one step.

    All-gather: keys and values of whole sequences, whose gradients are scattered sums. Ulysses: queries, keys and
    values to the ranks of their heads and the result back, and the same of gradients. Ring: keys and values to the next
    rank as often as there are other ranks; in backward again, with their gradients, which are summed in float32.

    Args:
        parts: The model in its layout.
        num_tokens: Tokens of a rank's parts of all micro-batches.
    """
    config, shape = parts.config, parts.plan.shape
    if config.cp_method is None:
        return
    dtype = config.precision.compute_dtype or parts.parameters[0].dtype
    head = num_tokens * shape.head_dim * dtype.itemsize
    heads, kv_heads = shape.num_heads // config.tp, shape.num_kv_heads // config.tp
    blocks, again = len(parts.plan.blocks), _blocks_again(parts)
    kinds: dict[str, Kind] = {"allgather": "all_gather", "ring": "all_to_all", "ulysses": "all_to_all"}
    kind, others = kinds[config.cp_method], config.cp - 1
    forward = {
        "allgather": 2 * kv_heads * head * config.cp,
        "ring": 2 * kv_heads * head * others,
        "ulysses": (2 * heads + 2 * sent_kv_heads(kv_heads, config.cp)) * head,
    }[config.cp_method]
    yield Term(name="keys and values", channel=channel(config, kind, "cp", "forward"), payload_bytes=blocks * forward)
    backward = channel(config, kind, "cp", "backward")
    yield Term(name="keys and values again", channel=backward, payload_bytes=again * forward)
    if config.cp_method == "ring":
        yield Term(name="keys and values for backward", channel=backward, payload_bytes=blocks * forward)
        wide = max(dtype.itemsize, torch.float32.itemsize) // dtype.itemsize
        yield Term(name="gradients of keys and values", channel=backward, payload_bytes=blocks * forward * wide)
        return
    kind = "reduce_scatter" if config.cp_method == "allgather" else kind
    gradients = channel(config, kind, "cp", "backward")
    yield Term(name="gradients of keys and values", channel=gradients, payload_bytes=blocks * forward)


def whole_row_terms(parts: ModelParts, num_rows: int | None, num_tokens: int) -> Iterator[Term]:
    """Terms of layers with experts that look at whole rows: their load for a balance loss, and choices for a capacity.

    Args:
        parts: The model in its layout.
        num_rows: Rows of all micro-batches.
        num_tokens: Tokens of a rank's parts of them.

    Raises:
        ValueError: If the rows are not known and matter.
    """
    config, shape = parts.config, parts.plan.shape
    if config.cp == 1:
        return
    layers: dict[Phase, list[Block]] = {"forward": [block for block in parts.plan.blocks if block.has_experts]}
    every = config.activation_checkpoint_every
    is_again = config.activation_checkpointing != "none"
    layers["backward"] = [block for block in parts.plan.blocks[::every] if block.has_experts and is_again]
    for phase, blocks in layers.items():
        over, gather = (channel(config, kind, "cp", phase) for kind in ("all_reduce", "all_gather"))
        adding = sum(block.adds_loss for block in blocks)
        if adding and num_rows is None:
            raise ValueError("layers with a balance loss tell each other of each row under cp; give num_rows")
        yield Term(
            name="load of rows", channel=over, payload_bytes=adding * (num_rows or 0) * shape.num_experts * INT64
        )
        if parts.plan.of_whole_rows:
            choices = num_tokens * config.cp * shape.num_experts_per_token * INT64
            yield Term(name="choices of whole rows", channel=gather, payload_bytes=len(blocks) * choices)


@cache
def exchanges_again(method: str | None, checkpointing: str, policy: str) -> bool:
    """Whether checkpointed blocks gather or exchange a second time in backward, because nothing kept what came.

    Args:
        method: How `cp` exchanges.
        checkpointing: What is checkpointed.
        policy: What selective checkpointing keeps.
    """
    if checkpointing == "selective" and method == "allgather":
        keep = POLICIES[policy]()
        return not all(keep(op, ()) for op in GATHERS)
    return checkpointing != "none"


def _blocks_again(parts: ModelParts) -> int:
    config = parts.config
    again = exchanges_again(config.cp_method, config.activation_checkpointing, config.activation_checkpoint_policy)
    return len(parts.plan.blocks[:: config.activation_checkpoint_every]) if again else 0
