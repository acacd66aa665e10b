"""Initial values of the parameters of a model with mixtures of experts."""

import math

import torch
from torch import Generator, Tensor

from models.llama.init import init_llama_parameter
from models.moe.config import MoeConfig


@torch.no_grad()
def init_moe_parameter(config: MoeConfig, fqn: str, tensor: Tensor, generator: Generator) -> None:
    """Fills a parameter as in a dense model; experts and routers from the same normal distributions.

    Args:
        config: Shape of the model.
        fqn: Name of the parameter.
        tensor: The whole parameter, all experts together; filled in place.
        generator: Source of random numbers, on the tensor's device.

    Raises:
        ValueError: If the name is not one of such a model.
    """
    if fqn.endswith((".router.weight", ".experts.gate_proj", ".experts.up_proj")):
        tensor.normal_(0.0, config.init_std, generator=generator)
    elif fqn.endswith(".experts.down_proj"):
        tensor.normal_(0.0, config.init_std / math.sqrt(2 * config.num_layers), generator=generator)
    elif fqn.endswith(".router.selection_bias"):
        tensor.zero_()
    else:
        init_llama_parameter(config, fqn, tensor, generator)
