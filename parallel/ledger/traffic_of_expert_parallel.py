"""Predicts what `ep` sends: rows to the ranks that hold their experts, and back."""

from collections.abc import Iterator

from parallel.ledger.parts import ModelParts
from parallel.ledger.term import Term, channel

INT64 = 8


def expert_parallel_terms(parts: ModelParts, num_micro_batches: int, num_tokens: int) -> Iterator[Term]:
    """Terms of one step.

    What a rank sends of its own tokens is exact. What it sends back depends on how many rows came, which only routing
    decides: the terms say what that is where each rank of `ep` gets as many, and over the ranks of a group they add up
    to what is sent. Tokens that are dropped are not sent, so that with a capacity factor these are upper bounds.

    Args:
        parts: The model in its layout.
        num_micro_batches: Micro-batches of a rank.
        num_tokens: Tokens of a rank's parts of all micro-batches.
    """
    config, shape = parts.config, parts.plan.shape
    if config.ep == 1:
        return
    dtype = config.precision.compute_dtype or parts.parameters[0].dtype
    layers = sum(block.has_experts for block in parts.plan.blocks)
    again = 0
    if config.activation_checkpointing != "none":
        again = sum(block.has_experts for block in parts.plan.blocks[:: config.activation_checkpoint_every])
    counts = num_micro_batches * shape.num_experts * INT64
    rows = num_tokens * shape.num_experts_per_token * shape.width * dtype.itemsize
    forward, backward = (channel(config, "all_to_all", "ep", phase) for phase in ("forward", "backward"))
    for where, name, times in ((forward, "", layers), (backward, " again", again)):
        yield Term(name=f"numbers of rows{name}", channel=where, payload_bytes=times * counts)
        yield Term(name=f"rows to their experts{name}", channel=where, payload_bytes=times * rows)
        yield Term(name=f"rows back{name}, at an even load", channel=where, payload_bytes=times * rows)
    yield Term(name="gradients of rows back", channel=backward, payload_bytes=layers * rows)
    yield Term(name="gradients of rows, at an even load", channel=backward, payload_bytes=layers * rows)
