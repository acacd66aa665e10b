"""Puts back what a load changed before it failed."""

from copy import deepcopy
from typing import Any

from torch import Tensor

from checkpoint.state import TrainState


class Undo:
    """All of a training state but tensors of the model and the optimizer, as it was."""

    def __init__(self, state: TrainState) -> None:
        """Keeps copies; changes nothing.

        Args:
            state: What is about to be filled.
        """
        self.state = state
        self.counts = state.step, state.num_tokens
        self.stateful = {name: deepcopy(each.state_dict()) for name, each in state.stateful.items()}
        # Also where only `progress` is loaded: a learning-rate scheduler writes into the groups.
        groups = [] if state.optimizer is None else state.optimizer.param_groups
        self.groups = [
            {key: (value, _copy(value)) for key, value in group.items() if key != "params"} for group in groups
        ]

    def __call__(self, attempted: list[str], error: BaseException) -> None:
        """Puts all of it back.

        Args:
            attempted: Names of what is stateful and may have changed, in the order of the changes.
            error: Why; gets a note of whatever refuses its own earlier state.
        """
        for name in reversed(attempted):
            try:
                self.state.stateful[name].load_state_dict(self.stateful[name])
            except Exception as failure:
                error.add_note(f"stateful.{name} could not be put back ({failure!r}); build it anew")
        self.state.step, self.state.num_tokens = self.counts
        if self.state.optimizer is not None:
            for group, before in zip(self.state.optimizer.param_groups, self.groups, strict=True):
                for key in group.keys() - before.keys() - {"params"}:
                    del group[key]
                for key, (value, copy) in before.items():
                    group[key] = value.copy_(copy) if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else None
