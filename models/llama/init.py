"""Initial values of a LLaMA-style model's parameters."""

import math

import torch
from torch import Generator, Tensor

from models.llama.config import LlamaConfig


@torch.no_grad()
def init_llama_parameter(config: LlamaConfig, fqn: str, tensor: Tensor, generator: Generator) -> None:
    """Fills a parameter: norms with ones, biases with zeros, matrices from a normal distribution.

    Args:
        config: Shape of the model.
        fqn: Name of the parameter.
        tensor: The whole parameter; filled in place.
        generator: Source of random numbers, on the tensor's device.

    Raises:
        ValueError: If the name is not one of a LLaMA-style model.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3, for the
    projections into the residual stream.
    """
    module, _, kind = fqn.rpartition(".")
    name = module.rpartition(".")[2]
    if kind == "weight" and (name == "norm" or name.endswith("_norm")):
        tensor.fill_(1.0)
    elif kind == "bias" and name in ("q_proj", "k_proj", "v_proj"):
        tensor.zero_()
    elif kind == "weight" and name in ("o_proj", "down_proj"):
        tensor.normal_(0.0, config.init_std / math.sqrt(2 * config.num_layers), generator=generator)
    elif kind == "weight" and name in ("embed", "head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        tensor.normal_(0.0, config.init_std, generator=generator)
    else:
        raise ValueError(f"no initial values are known for {fqn!r}; it is no parameter of a LLaMA-style model")
