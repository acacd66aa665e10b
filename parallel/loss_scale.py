"""Scales the loss of float16 models so that gradients neither vanish nor overflow, alike on every rank."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from parallel import gradients
from parallel.precision import LossScaling

if TYPE_CHECKING:
    from parallel.trained import Trained


class LossScale:
    """The scale of a run, which follows what its steps have met.

    Attributes:
        value: What the loss is multiplied by.
        num_good_steps: Steps since the scale was last changed.
        num_skipped: Steps of the run that overflowed and changed nothing.

    Args:
        config: How it changes.
    """

    def __init__(self, config: LossScaling) -> None:
        self._config = config
        self.value = config.initial
        self.num_good_steps = self.num_skipped = 0

    def update(self, *, overflowed: bool) -> None:
        """Takes note of a step.

        Args:
            overflowed: Whether any gradient on any rank was not finite.

        Raises:
            FloatingPointError: If one was not although the scale is 1, so that no smaller scale would help.
        """
        if overflowed:
            if self.value == 1.0:
                raise FloatingPointError(
                    "gradients are not finite although the loss scale is down at 1: the run has diverged, or the model "
                    "overflows float16 by itself; go on from an earlier checkpoint with a lower learning rate, or "
                    "compute in bfloat16 (precision.compute='bfloat16')"
                )
            # Below 1 gradients would vanish that overflow for another reason.
            self.value = max(1.0, self.value * self._config.backoff)
            self.num_good_steps = 0
            self.num_skipped += 1
            return
        self.num_good_steps += 1
        if self.num_good_steps == self._config.growth_interval:
            self.value *= self._config.growth
            self.num_good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on with the same scale."""
        return {"value": self.value, "num_good_steps": self.num_good_steps, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state over.

        Args:
            state: What `state_dict` gave.

        Raises:
            ValueError: If it is none.
        """
        value, counts = state["value"], [state["num_good_steps"], state["num_skipped"]]
        if not isinstance(value, float) or not 1 <= value < math.inf or not all(type(each) is int for each in counts):
            raise ValueError(f"{dict(state)} is no state of a loss scale")
        self.value, (self.num_good_steps, self.num_skipped) = value, counts


def check_loss_scale(model: nn.Module) -> None:
    """Refuses parameters stored in float16, whose gradients and updates no scale could save.

    Args:
        model: The whole model.

    Raises:
        ValueError: If a trainable parameter is one.
    """
    narrow = [fqn for fqn, each in model.named_parameters() if each.requires_grad and each.dtype == torch.float16]
    if narrow:
        raise ValueError(
            f"{len(narrow)} parameters are stored in float16 ({', '.join(narrow[:3])} ...), in which gradients and "
            "updates vanish; store float32 and set precision=Precision(compute='float16', reduce='float32')"
        )


@torch.no_grad()
def unscale_or_skip(trained: "Trained") -> bool:
    """Divides the gradients of a step by its scale, or drops them all where any rank has one that is not finite.

    Ranks agree by one all-reduce of 4 bytes over all of the job, those without gradients too.

    Args:
        trained: What has just gone backward; its scale takes note.

    Returns:
        Whether the step is skipped: then no parameter has a gradient.

    Raises:
        FloatingPointError: On every rank, if gradients are not finite although the scale is 1.
    """
    scale = trained.loss_scale
    if scale is None:
        return False
    parameters = list(trained.named_parameters().values())
    local = gradients.local_gradients(parameters)
    held = [each for each in local if each.numel()]
    # An infinity norm is not finite exactly if any element is not.
    finite = get_total_norm(held, math.inf).isfinite() if held else torch.tensor(True)
    skipped = _on_any_rank((~finite).to(trained.mesh.device, torch.int32))
    if skipped:
        for parameter in parameters:
            parameter.grad = None
    else:
        for each in held:
            each.mul_(1.0 / scale.value)
    scale.update(overflowed=skipped)
    return skipped


def _on_any_rank(flag: torch.Tensor) -> bool:
    """Whether a flag, an int32 scalar, is set on any rank of the job."""
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
