"""AdamW, and which parameters its weight decay spares."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from torch.optim import AdamW

from recipes.checks import check_integer, check_number

FUSED_DEVICES = {"cpu", "cuda"}
"""Types of devices for which torch has a fused AdamW, among those that meshes are built on."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW.

    Attributes:
        lr: Peak learning rate; the schedule multiplies it.
        lr_scaling: Scale `lr` with the global batch: `linear` in it, or with its square root (`sqrt`). None: `lr` holds
            whatever the batch.
        lr_reference_batch: With lr_scaling, the global batch in sequences for which `lr` holds as it is.
        betas: Decay of the running means of the gradient and of its square, per step.
        eps: Added to the denominator of an update.
        weight_decay: Decoupled decay of matrices, per step in units of the learning rate; norms and biases have none.
        implementation: Kernels of the step: fused, foreach (several parameters at a time) or loop. None: fused where
            torch has that for the device, else as torch chooses.
    """

    lr: float = 1e-3
    lr_scaling: Literal["linear", "sqrt"] | None = None
    lr_reference_batch: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    implementation: Literal["fused", "foreach", "loop"] | None = None

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range.
        """
        check_number("lr", self.lr, above=0)
        check_number("eps", self.eps, above=0)
        check_number("weight_decay", self.weight_decay)
        if len(self.betas) != 2:
            raise ValueError(f"betas={self.betas!r} must be two numbers")
        for beta in self.betas:
            check_number("beta", beta)
            if beta >= 1:
                raise ValueError(f"betas={self.betas!r} must both be less than 1")
        if self.implementation not in (None, "fused", "foreach", "loop"):
            raise ValueError(f"unknown implementation {self.implementation!r}; legal: fused, foreach, loop")
        if self.lr_scaling not in (None, "linear", "sqrt"):
            raise ValueError(f"unknown lr_scaling {self.lr_scaling!r}; legal: linear, sqrt")
        if (self.lr_scaling is None) != (self.lr_reference_batch is None):
            raise ValueError(
                f"lr_scaling={self.lr_scaling!r} and lr_reference_batch={self.lr_reference_batch!r} need each other: "
                "give the rule and the global batch for which lr holds, or neither"
            )
        if self.lr_reference_batch is not None:
            check_integer("lr_reference_batch", self.lr_reference_batch, minimum=1)

    def at_batch(self, global_batch: int) -> "OptimizerConfig":
        """The config with the learning rate of a global batch, and no rule left to scale it.

        Args:
            global_batch: Sequences of one step, over all ranks.

        Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1, for `linear`; Malladi et al. 2022, "On
        the SDEs and Scaling Rules for Adaptive Gradient Algorithms", for `sqrt`, which suits Adam.
        """
        if self.lr_scaling is None or self.lr_reference_batch is None:
            return self
        ratio = global_batch / self.lr_reference_batch
        scale = ratio if self.lr_scaling == "linear" else math.sqrt(ratio)
        return replace(self, lr=self.lr * scale, lr_scaling=None, lr_reference_batch=None)


def decay_groups(named_parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: matrices decay, vectors (norms, biases) do not; frozen parameters are in none.

    Args:
        named_parameters: Parameters by fqn; one that has several names counts once.
        weight_decay: Decay of the matrices.

    Returns:
        One group of matrices and one of vectors, each with its name, in the order of the names of parameters; none
        that is empty.

    Raises:
        ValueError: If nothing is trainable.
    """
    distinct = {id(parameter): parameter for parameter in named_parameters.values() if parameter.requires_grad}
    if not distinct:
        raise ValueError(f"nothing to optimize: none of {len(named_parameters)} parameters is trainable")
    groups = [
        {
            "name": "matrices",
            "params": [each for each in distinct.values() if each.ndim >= 2],
            "weight_decay": weight_decay,
        },
        {"name": "vectors", "params": [each for each in distinct.values() if each.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw_factory(config: OptimizerConfig) -> Callable[[Mapping[str, nn.Parameter]], AdamW]:
    """A function that builds AdamW from parameters by fqn, as `Trained.build_optimizer` takes it.

    Args:
        config: The hyperparameters.
    """
    kernels: dict[str, bool] = {}
    if config.implementation is not None:
        kernels = {name: config.implementation == name for name in ("fused", "foreach")}

    def build(named_parameters: Mapping[str, nn.Parameter]) -> AdamW:
        groups = decay_groups(named_parameters, config.weight_decay)
        devices = {each.device.type for group in groups for each in group["params"]}
        chosen = kernels or ({"fused": True} if devices <= FUSED_DEVICES else {})
        return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **chosen)

    return build
