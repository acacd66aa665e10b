"""Lets an optimizer over DTensors do its arithmetic on this rank's shards."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

State = dict[str, Any]

NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")
"""Classes of `torch.optim` whose update of an element depends on others."""


class Shards(Protocol):
    """Which part of a parameter, its gradient and its state this rank updates."""

    def part(self, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        """This rank's part of a tensor of the parameter's shape, sharing its memory where it can."""
        ...

    def whole(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """The tensor of the parameter's shape that such a part belongs to."""
        ...

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called after each step, when the parts are updated."""
        ...


class OwnShards:
    """The parts that the parameters' own layout gives this rank."""

    def part(self, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        """The local part of a DTensor, a plain tensor as it is."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """A DTensor of the parameter's layout."""
        if not isinstance(parameter, DTensor):
            return part
        return DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Does nothing: the parts are all that there is."""


def step_on_local_shards(optimizer: Optimizer, shards: Shards) -> None:
    """Makes `optimizer.step()` see plain tensors, which saves DTensor's dispatch and suits any kernel.

    Outside of a step, groups and state hold the model's own parameters and state of their shape. Right only
    for optimizers that treat each element by itself, as SGD and the Adam family do.

    Args:
        optimizer: Its groups hold the model's parameters.
        shards: The parts to step on.

    Raises:
        ValueError: If the optimizer is known to look at whole matrices.
    """
    refused = [kind for kind in type(optimizer).__mro__ if kind.__name__ in NOT_ELEMENTWISE]
    if refused:
        raise ValueError(
            f"{refused[0].__name__} looks at whole matrices, of which a rank here holds a part, so its numbers "
            "would depend on the layout; use an optimizer that treats each element by itself, or data_parallel='ddp'"
        )
    swap = _Swap(optimizer, shards)

    def before(_optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first argument is the optimizer itself.
        if any(each is not None for each in (*args[1:], kwargs.get("closure"))):
            raise ValueError(
                "optimizer.step() takes no closure here, as it would compute gradients while the optimizer holds local "
                "shards; compute them before, with trained.forward_backward"
            )
        swap.to_local()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: swap.to_distributed())


class _Swap:
    """Exchanges an optimizer's parameters and state for their local parts and back.

    What a step finds as the last one left it is not taken apart again: per parameter that costs a few identity
    checks, where DTensor's dispatch costs each op of the arithmetic some 50 microseconds.
    """

    def __init__(self, optimizer: Optimizer, shards: Shards) -> None:
        self._optimizer, self._shards = optimizer, shards
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
                entries.update({name: self._adopt(value, parameter) for name, value in entries.items()})
                local = {name: self._unwrap(value, parameter) for name, value in entries.items()}
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
                        name: known[name] if name in local and local[name] is value else self._wrap(value, parameter)
                        for name, value in left.items()
                    }
                    self._states[parameter] = (whole, left)
                    self._distributed_state[parameter] = dict(whole)
            group["params"] = parameters
        optimizer.state, self._distributed_state = self._distributed_state, None
        self._shards.finish(parameter for parameters in self._groups for parameter in parameters)

    def _twin(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter over this rank's part of another, with the same part of its gradient."""
        data = self._shards.part(parameter, parameter)
        twin = self._twins.get(parameter)
        if twin is None or twin.data_ptr() != data.data_ptr():
            twin = nn.Parameter(data.detach(), requires_grad=parameter.requires_grad)
            self._twins[parameter] = twin
        twin.grad = None if parameter.grad is None else self._shards.part(parameter.grad, parameter)
        return twin

    def _adopt(self, value: Any, parameter: nn.Parameter) -> Any:
        """State that was made before the first step, and so whole on every rank, becomes this rank's part of it."""
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.dim():
            return value
        if value.shape != parameter.shape:
            return value
        # A copy, so that the other rows are freed.
        whole = self._shards.whole(self._shards.part(value, parameter).clone(), parameter)
        return whole if isinstance(whole, DTensor) else value

    def _unwrap(self, value: Any, parameter: nn.Parameter) -> Any:
        """This rank's part of state of the parameter's shape; anything else as it is."""
        if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
            return self._shards.part(value, parameter)
        return value

    def _wrap(self, value: Any, parameter: nn.Parameter) -> Any:
        """State of the shape of this rank's part as a whole; anything else as it is."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if value.shape != self._twins[parameter].shape:
            raise ValueError(
                f"{type(self._optimizer).__name__} keeps state of the shape {list(value.shape)} for a part of shape "
                f"{list(self._twins[parameter].shape)}, so it does not treat each element by itself and its numbers "
                "would depend on the layout; use another optimizer, or data_parallel='ddp'"
            )
        return self._shards.whole(value, parameter)


def _same(one: State, other: State) -> bool:
    return len(one) == len(other) and all(name in other and other[name] is value for name, value in one.items())
