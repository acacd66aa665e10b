"""Sends as many tokens to each expert, so that what a traced step holds and sends does not hang on made-up values."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class EvenRouting(TorchDispatchMode):
    """Lets routers pick experts in turn: the first token the first ones, the next token those after them, and so on.

    Made-up tokens are all alike and would all go to the same experts, where trained routers come close to an even load.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets the op run; of what a router ranked highest the numbers are replaced."""
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default:
            return result
        scores, (values, indices) = args[0], result
        return values, _in_turn(indices, scores.shape[-1])


def _in_turn(like: Tensor, num_experts: int) -> Tensor:
    # Private: there is no public way to leave all modes. What is made within them counts as the step's memory.
    from torch.utils._python_dispatch import _disable_current_modes

    picked = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    with _disable_current_modes():
        picked.copy_(torch.arange(picked.numel()).view(picked.shape) % num_experts)
    return picked
