"""Runs a model in another dtype than its parameters are stored in, without sharding them."""

from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def in_compute_dtype(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model as it is where nothing is to be cast, wrapped where something is.

    Args:
        model: The model.
        dtype: Dtype of its forward; None leaves it to the parameters.
    """
    return model if dtype is None else ComputeDtype(model, dtype)


class ComputeDtype(nn.Module):
    """Casts every parameter for each forward, as `fully_shard` does when it gathers them; gradients are cast back.

    Attributes:
        module: The model.
        dtype: Dtype of the forward.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Keeps the model as a submodule.

        Args:
            module: The model.
            dtype: Dtype of the forward.
        """
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        cast = {fqn: each.to(self.dtype) for fqn, each in self.module.named_parameters()}
        return functional_call(self.module, cast, args, kwargs)
