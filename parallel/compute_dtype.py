"""Runs a model in another dtype than its parameters are stored in, without sharding them."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from parallel.config import ParallelConfig
from parallel.plan import ParallelPlan


def in_compute_dtype(model: nn.Module, config: ParallelConfig, plan: ParallelPlan) -> nn.Module:
    """The model as it is where nothing is to be cast, wrapped where something is.

    Args:
        model: The model, activation checkpointing applied.
        config: The layout.
        plan: What the model declares about itself.
    """
    dtype = config.precision.compute_dtype
    return model if dtype is None else ComputeDtype(model, dtype, blocks_that_cast(config, plan))


def blocks_that_cast(config: ParallelConfig, plan: ParallelPlan) -> tuple[str, ...]:
    """Blocks that backward computes again, when the model's own cast is over: they cast their parameters themselves.

    A graph that chooses by itself what to compute again has been given parameters that are cast.

    Args:
        config: The layout.
        plan: What the model declares about itself.
    """
    mode = config.activation_checkpointing
    if config.precision.compute_dtype is None or mode == "none" or (mode == "selective" and config.compile):
        return ()
    return tuple(block.fqn for block in plan.blocks[:: config.activation_checkpoint_every])


def cast_within(module: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """A forward of a module that casts the module's parameters each time.

    Args:
        module: The module, whose forward now is what computes.
        dtype: Dtype of the forward.
    """
    computes = _Computes(module)

    def casting(*args: Any, **kwargs: Any) -> Any:
        cast = {f"module.{fqn}": each.to(dtype) for fqn, each in module.named_parameters()}
        return functional_call(computes, cast, args, kwargs)

    return casting


class _Computes(nn.Module):
    """Calls the forward that a module had, without the module's hooks, which run around what replaces it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._forward = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class ComputeDtype(nn.Module):
    """Casts every parameter for each forward, as `fully_shard` does when it gathers them; gradients are cast back.

    Attributes:
        module: The model.
        dtype: Dtype of the forward.
        fqns: Parameters that it casts.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, apart: tuple[str, ...] = ()) -> None:
        """Keeps the model as a submodule.

        Args:
            module: The model.
            dtype: Dtype of the forward.
            apart: Modules that cast their own.
        """
        super().__init__()
        self.module, self.dtype = module, dtype
        starts = tuple(f"{fqn}." for fqn in apart)
        # By name: the replicas of `DataParallel` have tensors where the model has parameters.
        self.fqns = [fqn for fqn, _ in module.named_parameters() if not fqn.startswith(starts)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        cast = {fqn: attrgetter(fqn)(self.module).to(self.dtype) for fqn in self.fqns}
        return functional_call(self.module, cast, args, kwargs)
