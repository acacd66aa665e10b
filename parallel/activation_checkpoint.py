"""Recomputes activations of a model's blocks in backward instead of keeping them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from parallel.compute_dtype import cast_within
from parallel.plan import Block

Keep = Callable[[Any, tuple[Any, ...]], bool]
"""Whether the result of an op is kept: takes the op and its arguments, in the order in which a block calls them."""

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
MATMULS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default})
ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
GATHERS = frozenset({_collectives.all_gather_into_tensor.default})
REDUCTIONS = frozenset({_collectives.reduce_scatter_tensor.default, _collectives.all_reduce.default})


# Undocumented: torch compares the ops of both passes by number. Marks of a profiler compute nothing, and a unit of
# experts within a block sets one more where backward computes the block again; parity of experts fails if this moves.
SAC_IGNORED_OPS |= {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


def _attention() -> Keep:
    """Fused attention, whose cost grows with the square of the sequence, and what tensor-parallel ranks have summed."""
    return lambda op, arguments: op in ATTENTION or op in REDUCTIONS


def _matmuls() -> Keep:
    """What `attention` keeps and every matmul but those that tp ranks sum: what is left costs next to nothing."""
    return lambda op, arguments: op in ATTENTION or op in REDUCTIONS or _is_whole_matmul(op, arguments)


def _every_second_matmul() -> Keep:
    """What `attention` keeps and the second, fourth, ... matmul of a block: half of the arithmetic is done again."""
    num_matmuls = 0

    def keep(op: Any, arguments: tuple[Any, ...]) -> bool:
        nonlocal num_matmuls
        if not _is_whole_matmul(op, arguments):
            return op in ATTENTION or op in REDUCTIONS
        num_matmuls += 1
        # Even ones: the last of a LLaMA block is its seventh, and no last one is ever computed again.
        return num_matmuls % 2 == 0

    return keep


POLICIES: dict[str, Callable[[], Keep]] = {
    "every_second_matmul": _every_second_matmul,
    "attention": _attention,
    "matmuls": _matmuls,
}
"""Policies of selective checkpointing by the name that a config gives: each makes a new `Keep` for every forward of a
block, so that it may count. Code that runs before `parallelize` on every rank may add to it."""


def check_policy(name: str) -> None:
    """Refuses a policy that nobody registered.

    Args:
        name: What a config gives.

    Raises:
        ValueError: If `POLICIES` has no such name.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown activation_checkpoint_policy {name!r}; legal: {', '.join(POLICIES)}")


def keeps_attention(policy: str) -> bool:
    """Whether a policy keeps what fused attention gives.

    Args:
        policy: Name of one of `POLICIES`.
    """
    keep = POLICIES[policy]()
    return all(keep(op, ()) for op in ATTENTION)


def apply_activation_checkpointing(
    model: nn.Module,
    blocks: Sequence[Block],
    mode: Literal["none", "full", "selective"],
    *,
    every: int,
    policy: str,
    cast: torch.dtype | None = None,
) -> None:
    """Makes the first block and every n-th after it keep less than autograd would.

    A block's forward is replaced rather than the block wrapped, so no name changes, and whatever hooks on the block
    gather its parameters run around the checkpoint: in backward they are there before anything is computed again.

    Args:
        model: The whole model, already split by tensor parallel where that is in use.
        blocks: Its blocks, in the order in which they run.
        mode: `none` changes nothing; `full` keeps a block's input; `selective` also keeps what the policy says.
        every: n. The last block, whose activations backward needs at once, is the best one to leave out.
        policy: Name of one of `POLICIES`.
        cast: Dtype to which each of these blocks casts its parameters, in either pass; None: others do that, for both.
    """
    if mode == "none":
        return
    arguments = {"context_fn": functools.partial(_contexts, POLICIES[policy])} if mode == "selective" else {}
    for block in blocks[::every]:
        module = model.get_submodule(block.fqn)
        forward = module.forward if cast is None else cast_within(module, cast)
        module.forward = _checkpointed(forward, arguments)


def _checkpointed(forward: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **arguments, **kwargs)

    return checkpointed


def _contexts(make: Callable[[], Keep]) -> Any:
    """The contexts of one block's forward and of computing it again."""
    # Torch before 2.12 asks the policy again in the second pass, which then needs a count of its own.
    keep = {False: make(), True: make()}

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = keep[bool(context.is_recompute)](op, args)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def _is_whole_matmul(op: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether an op is a matmul whose result is not a part of a sum over tp ranks: of those the smaller sum is kept."""
    if op not in MATMULS:
        return False
    left = arguments[1] if op == _aten.addmm.default else arguments[0]
    return not (isinstance(left, DTensor) and any(each.is_shard(left.dim() - 1) for each in left.placements))
