"""What the forward of a sharded module is wrapped in."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel.replicas import local_part


def gather_in_backward_if_kept(modules: Sequence[nn.Module]) -> None:
    """Spares a unit's gather in backward, unless its forward has kept one of its weights for that.

    Args:
        modules: The unit's, in the order in which they run; `fully_shard` comes after this.
    """
    kept = False

    def watch(module: nn.Module) -> None:
        inner = module.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            weights = {local_part(each).untyped_storage().data_ptr() for each in module.parameters()} - {0}

            def pack(tensor: Tensor) -> Tensor:
                nonlocal kept
                kept = kept or local_part(tensor).untyped_storage().data_ptr() in weights
                return tensor

            nonlocal kept
            kept = kept and module is not modules[0]
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = inner(*args, **kwargs)
            if torch.is_grad_enabled():
                module.set_unshard_in_backward(kept)  # type: ignore[operator]  # fully_shard has made it an FSDPModule
            return output

        module.forward = forward

    for module in modules:
        watch(module)


def refuse_direct_forward(module: nn.Module, fqn: str, instead: str = "the module itself") -> None:
    """Makes `module.forward(...)` say what is wrong: it skips the hooks that gather the parameters.

    Args:
        module: Whose.
        fqn: Its name.
        instead: What to call.
    """
    inner = module.forward
    entered = False

    def enter(_module: nn.Module, _inputs: object) -> None:
        nonlocal entered
        # The compiler traces modules of a block through their hooks, and knows no effect of theirs on the outside.
        if not torch.compiler.is_compiling():
            entered = True

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal entered
        if torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        if not entered:
            raise RuntimeError(
                f"the parameters of {fqn} would be used while sharded; call {instead}, not its .forward()"
            )
        entered = False
        return inner(*args, **kwargs)

    module.register_forward_pre_hook(enter)
    module.forward = forward
