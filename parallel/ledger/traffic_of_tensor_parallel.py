"""Predicts what `tp` sends: activations at the borders of split modules, and the loss over a split vocabulary."""

from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache
from math import prod

import torch

from parallel.activation_checkpoint import GATHERS, POLICIES, REDUCTIONS
from parallel.ledger.lookup import by_block
from parallel.ledger.parts import ModelParts, num_reductions
from parallel.ledger.spans import spans_of
from parallel.ledger.term import Term, channel
from parallel.plan import TensorParallelStyle, innermost

READERS: tuple[TensorParallelStyle, ...] = ("gather_input", "head", "expert_layer")
"""Styles that need the whole residual stream."""

WRITERS: tuple[TensorParallelStyle, ...] = ("embedding", "rowwise", "expert_layer")
"""Styles whose outputs are partial sums of it."""


WEIGHTS: tuple[TensorParallelStyle, ...] = ("weight_replicate", "weight_colwise", "weight_rowwise", "partial_replicate")
"""Styles of weights whose inputs and outputs the module around them sees to."""


def tensor_parallel_terms(parts: ModelParts, num_micro_batches: int, num_tokens: int) -> Iterator[Term]:
    """Terms of one step.

    Args:
        parts: The model in its layout.
        num_micro_batches: Micro-batches of a rank.
        num_tokens: Tokens of all of them; ranks of one `tp` group have the same ones.
    """
    if parts.config.tp == 1:
        return
    yield from _activations(parts, num_tokens)
    yield from _loss(parts, num_tokens)
    yield from _norms(parts, num_micro_batches)
    yield from _routers(parts, num_tokens)


def _activations(parts: ModelParts, num_tokens: int) -> Iterator[Term]:
    """The residual stream is gathered before each module that reads it whole, and what modules write is summed.

    Backward of a gather is a scattered sum and the reverse. Without sequence parallel every rank has the whole
    stream, so that nothing is gathered and sums are all-reduces.
    """
    config, split = parts.config, parts.config.sequence_parallel
    hidden = num_tokens * parts.plan.shape.width * _compute_dtype(parts).itemsize
    over = {
        phase: (
            channel(config, "all_gather", "tp", phase) if split else None,
            channel(config, "reduce_scatter" if split else "all_reduce", "tp", phase),
        )
        for phase in ("forward", "backward")
    }
    readers, writers = _count(parts, READERS), _count(parts, WRITERS)
    back_readers, back_writers = _gone_back_through(parts)
    again_readers, again_writers = _computed_again(parts)
    sent = (
        ("activations", over["forward"], (readers, writers)),
        ("gradients of activations", over["backward"], (back_writers, back_readers)),
        ("activations again", over["backward"], (again_readers, again_writers)),
    )
    for name, channels, counts in sent:
        for where, count in zip(channels, counts, strict=True):
            if where is not None:
                yield Term(name=name, channel=where, payload_bytes=count * hidden)


@lru_cache
def _gone_back_through(parts: ModelParts) -> tuple[int, int]:
    """Readers and writers whose gradients are wanted: backward ends at the first module that has anything to train."""
    place = {fqn: number for number, fqn in enumerate(by_block(parts))}

    def block_of(fqn: str) -> int:
        return place.get(innermost(fqn, place) or "", -1)

    # Styles stand in the order in which modules of a block run, but for those of weights within a module.
    own = [fqn for fqn, style in parts.styles.items() if style not in WEIGHTS]
    order = {fqn: number for number, fqn in enumerate(sorted(own, key=block_of))}

    def runs_at(parameter: str) -> int:
        return order.get(innermost(parameter, order) or "", -1)

    first = min((runs_at(each.fqn) for each in parts.parameters if each.trainable), default=len(order))
    if not spans_of(parts)[0].is_first:
        # What comes from another stage has a gradient.
        first = -1
    readers = sum(parts.styles[fqn] in READERS and number > first for fqn, number in order.items())
    writers = sum(parts.styles[fqn] in WRITERS and number >= first for fqn, number in order.items())
    return readers, writers


@lru_cache
def _computed_again(parts: ModelParts) -> tuple[int, int]:
    """Readers and writers within blocks that run a second time in backward, because nothing kept what they gave."""
    config = parts.config
    if config.activation_checkpointing == "none":
        return 0, 0
    again = {block.fqn for block in parts.plan.blocks[:: config.activation_checkpoint_every]}
    inside = {
        styles: Counter(innermost(fqn, again) for fqn, style in parts.styles.items() if style in styles)
        for styles in (READERS, WRITERS)
    }
    readers = sum(inside[READERS][fqn] for fqn in again)
    # Autograd needs nothing of the last sum of a block, so that computing again stops before it.
    writers = sum(max(0, inside[WRITERS][fqn] - 1) for fqn in again)
    if config.activation_checkpointing == "selective":
        keep = POLICIES[config.activation_checkpoint_policy]()
        readers = 0 if all(keep(op, ()) for op in GATHERS) else readers
        writers = 0 if all(keep(op, ()) for op in REDUCTIONS) else writers
    return readers, writers


def _count(parts: ModelParts, styles: Collection[TensorParallelStyle]) -> int:
    """Modules of some styles."""
    return sum(style in styles for style in parts.styles.values())


def _loss(parts: ModelParts, num_tokens: int) -> Iterator[Term]:
    """With loss parallel three numbers a token: largest logit, sum of exponentials, target's logit; else the logits."""
    config, dtype = parts.config, _compute_dtype(parts)
    if not _count(parts, ["head"]):
        return
    if config.loss_parallel:
        itemsize = max(dtype.itemsize, torch.float32.itemsize)
        over = channel(config, "all_reduce", "tp", "forward")
        yield Term(name="loss over the vocabulary", channel=over, payload_bytes=3 * num_tokens * itemsize)
        return
    over = channel(config, "all_gather", "tp", "forward")
    vocab_size = parts.plan.shape.vocab_size
    yield Term(name="logits", channel=over, payload_bytes=num_tokens * vocab_size * dtype.itemsize)
    missing = -vocab_size % config.tp
    yield Term(name="logits: padding", channel=over, payload_bytes=num_tokens * missing * dtype.itemsize)


def _norms(parts: ModelParts, num_micro_batches: int) -> Iterator[Term]:
    """Ranks that saw a part of the sequence, heads or a matrix each add gradients of weights that all of them hold."""
    # Those of a pipeline are summed when its last micro-batch is done.
    over = channel(parts.config, "all_reduce", "tp", "forward" if parts.config.pp > 1 else "backward")
    precision = parts.config.precision
    names = {"head_norm": "gradients of norms", "weight_replicate": "gradients of whole weights"}
    names["partial_replicate"] = names["weight_replicate"]
    if parts.config.sequence_parallel:
        names["norm"] = "gradients of norms"
    times = num_reductions(parts.config, num_micro_batches)
    # What has been added up over micro-batches has the type in which it will be reduced.
    wide = precision.reduce_dtype if times < num_micro_batches else None
    for each in parts.parameters:
        style = parts.styles.get(each.fqn.rpartition(".")[0], "")
        if each.trainable and style in names:
            dtype = wide or precision.compute_dtype or each.dtype
            payload = times * prod(each.shape) * dtype.itemsize
            yield Term(name=names[style], channel=over, payload_bytes=payload)


def _routers(parts: ModelParts, num_tokens: int) -> Iterator[Term]:
    """What comes back to the weights of each token's experts is a partial sum, as each rank has a part of each."""
    over = channel(parts.config, "all_reduce", "tp", "backward")
    itemsize = max(_compute_dtype(parts).itemsize, torch.float32.itemsize)
    payload = num_tokens * parts.plan.shape.num_experts_per_token * itemsize
    for _ in range(_count(parts, ["router"])):
        yield Term(name="gradients of routing weights", channel=over, payload_bytes=payload)


def _compute_dtype(parts: ModelParts) -> torch.dtype:
    return parts.config.precision.compute_dtype or parts.parameters[0].dtype
