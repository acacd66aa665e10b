"""Builds the optimizers that the ledger knows, AdamW as a recipe does."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RMSprop

from parallel.ledger.optimizer_memory import kernels_of
from recipes.optimizer import OptimizerConfig, adamw_factory, decay_groups

_CLASSES: Mapping[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "adam": (Adam, {}),
    "sgd": (SGD, {}),
    "sgd_momentum": (SGD, {"momentum": 0.9}),
    "adagrad": (Adagrad, {}),
    "rmsprop": (RMSprop, {}),
    "adadelta": (Adadelta, {}),
    "adamax": (Adamax, {}),
    "nadam": (NAdam, {}),
}


def optimizer_factory(name: str, config: OptimizerConfig) -> Callable[[Mapping[str, nn.Parameter]], Optimizer]:
    """A function that builds an optimizer from parameters by fqn, as `Trained.build_optimizer` takes it.

    Args:
        name: One of `OPTIMIZERS`.
        config: Its learning rate, weight decay and kernels; all else is as torch has it, but for AdamW.

    Raises:
        ValueError: If the ledger does not know it, or torch has no such kernels of it.
    """
    kernels = kernels_of(name, config.implementation)
    if name == "adamw":
        return adamw_factory(config)
    kind, options = _CLASSES[name]
    options = options | ({"fused": True} if kernels == "fused" else {"foreach": kernels == "foreach"})
    return lambda named: kind(decay_groups(named, config.weight_decay), lr=config.lr, **options)
