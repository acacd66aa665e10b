"""The learning rate over the optimizer steps of a run."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from recipes.checks import check_fraction, check_integer

SHAPES = ("cosine", "wsd")
DECAYS = ("linear", "cosine", "sqrt", "exponential")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Linear warm-up to the peak, then down to a share of it.

    Attributes:
        shape: What follows the warm-up: `cosine`, half a cosine from the peak down; or `wsd` (warm-up, stable, decay),
            the peak itself until the last steps of the run, which decay. A run that stopped before its decay may go on
            with more steps, as if it had been planned so.
        warmup_steps: Optimizer steps over which the learning rate rises to its peak, which the last of them has.
        decay_fraction: With shape=wsd, share of the run's steps that decay, rounded up to whole steps; 0: none do.
        decay: With shape=wsd, how they go down: `linear`, `cosine`, `sqrt` (steep first: 1 minus the root of what is
            done of the decay) or `exponential` (by the same factor each step, which needs min_ratio > 0).
        min_ratio: Share of the peak that the last step of the run has.
    """

    shape: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 20
    decay_fraction: float = 0.1
    decay: Literal["linear", "cosine", "sqrt", "exponential"] = "linear"
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range, or does not go with another.
        """
        for name, legal in (("shape", SHAPES), ("decay", DECAYS)):
            if getattr(self, name) not in legal:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; legal: {', '.join(legal)}")
        check_integer("warmup_steps", self.warmup_steps, minimum=0)
        check_fraction("decay_fraction", self.decay_fraction)
        check_fraction("min_ratio", self.min_ratio)
        if self.decay == "exponential" and self.min_ratio == 0:
            raise ValueError(
                "decay='exponential' goes down by a constant factor and never reaches min_ratio=0; set min_ratio above "
                "0, such as 0.01, or use another decay"
            )

    def decay_steps(self, total_steps: int) -> int:
        """The steps at the end of a run over which the learning rate goes down.

        Args:
            total_steps: Optimizer steps of the run.
        """
        if self.shape == "cosine":
            return total_steps - self.warmup_steps
        # Rounded first: 0.07 of 100 steps is 7.000000000000001 in binary.
        return math.ceil(round(self.decay_fraction * total_steps, 9))

    def describe(self, total_steps: int) -> str:
        """What happens after the warm-up, in a few words.

        Args:
            total_steps: Optimizer steps of the run.
        """
        if self.shape == "cosine":
            return f"then by half a cosine to {self.min_ratio:g} of it"
        return (
            f"then stable, in the last {self.decay_steps(total_steps)} steps {self.decay} to {self.min_ratio:g} of it"
        )


def check_schedule(config: ScheduleConfig, total_steps: int) -> None:
    """Refuses a warm-up and a decay for which the run is too short.

    Args:
        config: The shape of the curve.
        total_steps: Optimizer steps of the run.

    Raises:
        ValueError: If warm-up and decay together are longer than the run.
    """
    if config.warmup_steps > total_steps:
        raise ValueError(
            f"warmup_steps={config.warmup_steps} must not exceed the {total_steps} optimizer steps of the run; "
            "shorten the warm-up (--schedule.warmup-steps) or train longer (--training.steps)"
        )
    decay_steps = config.decay_steps(total_steps)
    if config.warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"warmup_steps={config.warmup_steps} and the {decay_steps} steps of decay_fraction={config.decay_fraction} "
            f"together exceed the {total_steps} optimizer steps of the run; shorten one of them or train longer"
        )


def learning_rate_factor(step: int, config: ScheduleConfig, total_steps: int) -> float:
    """What the peak learning rate is multiplied by in one step.

    Args:
        step: Optimizer steps done before it.
        config: The shape of the curve.
        total_steps: Optimizer steps of the run; after them the factor stays that of the last one.

    Source of warm-up, stable, decay: Hu et al. 2024, "MiniCPM", section 4; of its decay `sqrt`: Haegele et al. 2024,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", section 4.
    """
    number = min(step + 1, total_steps)
    if number < config.warmup_steps:
        return number / config.warmup_steps
    start = total_steps - config.decay_steps(total_steps)
    if number <= start:
        return 1.0
    return _decayed((number - start) / (total_steps - start), config)


def _decayed(progress: float, config: ScheduleConfig) -> float:
    """The factor at a point of the decay, whose end has progress 1."""
    decay = "cosine" if config.shape == "cosine" else config.decay
    if decay == "exponential":
        return config.min_ratio**progress
    left = {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "sqrt": 1 - math.sqrt(progress),
    }[decay]
    return config.min_ratio + (1 - config.min_ratio) * left


class Schedule(LambdaLR):
    """Sets the learning rate of an optimizer; call `step` once after each optimizer step, whatever the mesh."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig, total_steps: int) -> None:
        """Sets the learning rate of the first step.

        Args:
            optimizer: Its groups hold the peak learning rates.
            config: The shape of the curve.
            total_steps: Optimizer steps of the run.

        Raises:
            ValueError: If there are no steps, or warm-up and decay are longer than the run.
        """
        check_integer("total_steps", total_steps, minimum=1)
        check_schedule(config, total_steps)
        self._shape: dict[str, Any] = {"total_steps": total_steps, **asdict(config)}
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
