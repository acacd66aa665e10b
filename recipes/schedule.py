"""The learning rate over the optimizer steps of a run."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from recipes.checks import check_fraction, check_integer


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up, then half a cosine down to a share of the peak.

    Attributes:
        warmup_steps: Optimizer steps over which the learning rate rises to its peak, which the last of them has.
        min_ratio: Share of the peak that the last step of the run has.
    """

    warmup_steps: int = 20
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range.
        """
        check_integer("warmup_steps", self.warmup_steps, minimum=0)
        check_fraction("min_ratio", self.min_ratio)


def check_warmup(config: ScheduleConfig, total_steps: int) -> None:
    """Refuses a warm-up that the run does not finish.

    Args:
        config: The shape of the curve.
        total_steps: Optimizer steps of the run.

    Raises:
        ValueError: If the warm-up is longer than the run.
    """
    if config.warmup_steps > total_steps:
        raise ValueError(
            f"warmup_steps={config.warmup_steps} must not exceed the {total_steps} optimizer steps of the run; "
            "shorten the warm-up or train longer"
        )


def learning_rate_factor(step: int, config: ScheduleConfig, total_steps: int) -> float:
    """What the peak learning rate is multiplied by in one step.

    Args:
        step: Optimizer steps done before it.
        config: The shape of the curve.
        total_steps: Optimizer steps of the run; the factor stays at `min_ratio` after them.
    """
    number = step + 1
    if number <= config.warmup_steps:
        return number / config.warmup_steps
    if number >= total_steps:
        return config.min_ratio
    progress = (number - config.warmup_steps) / (total_steps - config.warmup_steps)
    return config.min_ratio + (1 - config.min_ratio) * (1 + math.cos(math.pi * progress)) / 2


class WarmupCosine(LambdaLR):
    """Sets the learning rate of an optimizer; call `step` once after each optimizer step, whatever the mesh."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig, total_steps: int) -> None:
        """Sets the learning rate of the first step.

        Args:
            optimizer: Its groups hold the peak learning rates.
            config: The shape of the curve.
            total_steps: Optimizer steps of the run.

        Raises:
            ValueError: If there are no steps, or the warm-up is longer than the run.
        """
        check_integer("total_steps", total_steps, minimum=1)
        check_warmup(config, total_steps)
        self._shape: dict[str, Any] = {
            "total_steps": total_steps,
            "warmup_steps": config.warmup_steps,
            "min_ratio": config.min_ratio,
        }
        super().__init__(optimizer, lambda step: learning_rate_factor(step, config, total_steps))
        self._shape["peaks"] = list(self.base_lrs)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer steps done, the shape of the curve and its peak in each group, as JSON can hold them."""
        return {"step": self.last_epoch, **self._shape}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to the saved step and sets its learning rate; shape and peaks are this run's own.

        Warns where they are not the saved ones, since the learning rate then jumps.

        Args:
            state_dict: What `state_dict` gave.

        Raises:
            ValueError: If the state has no step.
        """
        if "step" not in state_dict:
            raise ValueError(f"the saved learning-rate schedule has no step, only {sorted(state_dict)}")
        check_integer("saved step", state_dict["step"], minimum=0)
        changes = [
            f"{name} {state_dict.get(name)} -> {value}"
            for name, value in self._shape.items()
            if state_dict.get(name) != value
        ]
        if changes:
            warnings.warn(
                f"the learning-rate schedule changes on resume (saved -> now): {'; '.join(changes)}", stacklevel=2
            )
        self.last_epoch = state_dict["step"]
        self._last_lr = [
            peak * factor(self.last_epoch) for peak, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate
