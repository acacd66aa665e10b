"""Runs a model in another dtype than its parameters are stored in, without sharding them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from parallel.config import Precision


def in_compute_dtype(model: nn.Module, precision: Precision) -> nn.Module:
    """The model as it is where nothing is to be cast, wrapped where something is.

    Args:
        model: The model.
        precision: Compute and output dtypes.
    """
    if precision.compute_dtype is None and precision.output_dtype is None:
        return model
    return ComputeDtype(model, precision.compute_dtype, precision.output_dtype)


class ComputeDtype(nn.Module):
    """Casts every parameter for each forward, as `fully_shard` does when it gathers them; gradients are cast back.

    Attributes:
        module: The model.
        compute_dtype: Dtype of the forward; None leaves parameters alone.
        output_dtype: Dtype of what it returns; None leaves that alone.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None, output_dtype: torch.dtype | None) -> None:
        """Keeps the model as a submodule.

        Args:
            module: The model.
            compute_dtype: Dtype of the forward; None leaves parameters alone.
            output_dtype: Dtype of what it returns; None leaves that alone.
        """
        super().__init__()
        self.module, self.compute_dtype, self.output_dtype = module, compute_dtype, output_dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the model returns."""
        cast = {fqn: each.to(self.compute_dtype or each.dtype) for fqn, each in self.module.named_parameters()}
        output: Tensor = functional_call(self.module, cast, args, kwargs)
        return output if self.output_dtype is None else output.to(self.output_dtype)
