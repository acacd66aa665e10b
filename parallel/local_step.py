"""Lets an optimizer over DTensors do its arithmetic on this rank's shards."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel.replicas import local_part

State = dict[str, Any]


def step_on_local_shards(optimizer: Optimizer) -> None:
    """Makes `optimizer.step()` see plain tensors, which saves DTensor's dispatch and suits any kernel.

    Outside of a step, groups and state hold the model's own parameters and DTensors of their layout. Right only
    for optimizers that treat each element by itself, as SGD and the Adam family do.

    Args:
        optimizer: Its groups hold DTensors, or DTensors and plain tensors.
    """
    swap = _Swap(optimizer)
    optimizer.register_step_pre_hook(lambda *_: swap.to_local())
    optimizer.register_step_post_hook(lambda *_: swap.to_distributed())


class _Swap:
    """Exchanges an optimizer's parameters and state for their local parts and back.

    What a step finds as the last one left it is not taken apart again: per parameter that costs a few identity
    checks, where DTensor's dispatch costs each op of the arithmetic some 50 microseconds.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._twins: dict[nn.Parameter, nn.Parameter] = {}
        # State of each parameter in both forms, as the last step left it.
        self._states: dict[nn.Parameter, tuple[State, State]] = {}
        self._groups: list[list[nn.Parameter]] = []
        self._distributed_state: Any = None

    @torch.no_grad()
    def to_local(self) -> None:
        """Before a step."""
        if self._distributed_state is not None:
            self.to_distributed()  # the last step raised half-way
        optimizer = self._optimizer
        self._groups = [group["params"] for group in optimizer.param_groups]
        self._distributed_state = optimizer.state
        local_state = type(optimizer.state)(dict)
        for group in optimizer.param_groups:
            group["params"] = [self._twin(parameter) for parameter in group["params"]]
        for parameter, entries in self._distributed_state.items():
            if parameter not in self._twins:
                local_state[parameter] = entries
                continue
            known, local = self._states.get(parameter, ({}, {}))
            if not _same(known, entries):
                local = {name: _unwrap(value) for name, value in entries.items()}
                self._states[parameter] = (dict(entries), local)
            local_state[self._twins[parameter]] = dict(local)
        optimizer.state = local_state

    @torch.no_grad()
    def to_distributed(self) -> None:
        """After a step."""
        optimizer = self._optimizer
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            for parameter, twin in zip(parameters, group["params"], strict=True):
                twin.grad = None
                if twin not in optimizer.state:
                    continue
                left = optimizer.state[twin]
                known, local = self._states.get(parameter, ({}, {}))
                if not _same(local, left):
                    # A value that the step did not replace keeps the form it came in.
                    whole = {
                        name: known[name] if name in local and local[name] is value else _wrap(value, parameter)
                        for name, value in left.items()
                    }
                    self._states[parameter] = (whole, left)
                    self._distributed_state[parameter] = dict(whole)
            group["params"] = parameters
        optimizer.state, self._distributed_state = self._distributed_state, None

    def _twin(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter over the local memory of another, with the local part of its gradient."""
        data = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        twin = self._twins.get(parameter)
        if twin is None or twin.data_ptr() != data.data_ptr():
            twin = nn.Parameter(data.detach(), requires_grad=parameter.requires_grad)
            self._twins[parameter] = twin
        gradient = parameter.grad
        twin.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        return twin


def _same(one: State, other: State) -> bool:
    return len(one) == len(other) and all(name in other and other[name] is value for name, value in one.items())


def _unwrap(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _wrap(value: Any, parameter: nn.Parameter) -> Any:
    """State of the parameter's shape as a DTensor of its layout; anything else as it is."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return value
    if value.dim() == 0 or value.shape != local_part(parameter).shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
