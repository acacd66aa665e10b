"""Reads an optimizer into canonical names and puts saved values back, without ever stepping it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from checkpoint.strict_json import Json, dumps, to_json

PREFIX = "optimizer."

SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that say how a step is computed, not what it computes. They stay as the optimizer was built,
because a loop that suits one layout (mixed plain tensors and DTensors, say) may not run on another."""


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """An optimizer in canonical names.

    Attributes:
        class_name: Name of its class.
        tensors: `optimizer.<fqn>.<entry>` -> tensor; empty before the first step.
        scalars: Same names -> state that is no tensor.
        groups: Per group: `params`, the fqns in it, and `hyperparameters`.
    """

    class_name: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Json] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


def read(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Describes an optimizer as it is.

    Args:
        optimizer: Holds parameters of the model itself.
        parameters: Canonical fqn -> parameter.

    Raises:
        ValueError: If the optimizer holds a parameter that the model does not have, or state that is neither a
            tensor nor JSON.
    """
    state = OptimizerState(class_name=type(optimizer).__name__)
    fqns = {id(parameter): fqn for fqn, parameter in parameters.items()}
    for index, group in enumerate(optimizer.param_groups):
        foreign = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in fqns]
        if foreign:
            raise ValueError(
                f"group {index} of the optimizer holds parameters of shapes {foreign} that are not the model's; "
                "build the optimizer after parallelize"
            )
        hyperparameters = {key: value for key, value in group.items() if key != "params" and key not in SWITCHES}
        state.groups.append(
            {
                "params": [fqns[id(parameter)] for parameter in group["params"]],
                "hyperparameters": {
                    key: to_json(value.item() if isinstance(value, Tensor) else value, f"optimizer group {index}.{key}")
                    for key, value in hyperparameters.items()
                },
            }
        )
        for parameter in group["params"]:
            # Not optimizer.state[...]: a defaultdict would create an entry.
            for entry, value in optimizer.state.get(parameter, {}).items():
                name = f"{PREFIX}{fqns[id(parameter)]}.{entry}"
                if isinstance(value, Tensor):
                    # Detaching a DTensor costs more than all else here.
                    state.tensors[name] = value.detach() if value.requires_grad else value
                else:
                    state.scalars[name] = to_json(value, name)
    return state


def merge(parts: Sequence[tuple[Collection[str], Mapping[str, Any] | None]]) -> dict[str, Any] | None:
    """One description of an optimizer out of those of ranks that hold different parameters.

    Args:
        parts: Names of the parameters that a rank holds, and how a header describes its optimizer.

    Returns:
        What the header of all says; None where they differ in more than the parameters that they hold.
    """
    described = [each for _, each in parts if each is not None]
    alike = {dumps([each["class"], [group["hyperparameters"] for group in each["groups"]]]) for each in described}
    if len(described) < len(parts) or len(alike) != 1:
        return None
    merged = []
    for groups in zip(*(each["groups"] for each in described), strict=True):
        params = list(dict.fromkeys(fqn for group in groups for fqn in group["params"]))
        for (held, _), group in zip(parts, groups, strict=True):
            if set(params) & set(held) != set(group["params"]):
                return None
        merged.append({**groups[0], "params": params})
    scalars = {name: value for each in described for name, value in each["scalars"].items()}
    return {"class": described[0]["class"], "groups": merged, "scalars": scalars}


def split_name(name: str) -> tuple[str, str]:
    """The fqn and the entry of `optimizer.<fqn>.<entry>`."""
    fqn, _, entry = name.removeprefix(PREFIX).rpartition(".")
    return fqn, entry


def new_entry(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], parameter: nn.Parameter, group: Mapping[str, Any]
) -> Tensor:
    """Room for a saved entry that a fresh optimizer does not have yet.

    Args:
        name: `optimizer.<fqn>.<entry>`.
        dtype: As saved.
        shape: Global shape, as saved.
        parameter: The parameter that it belongs to.
        group: The parameter's group.

    Returns:
        A tensor placed like the parameter where it has its shape; otherwise a plain one. `step` lies on the CPU,
        where optimizers read it, except for those that keep it on the device.
    """
    if split_name(name)[1] == "step":
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def attach(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    new_tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """Hands an optimizer the state that was loaded for it.

    Args:
        optimizer: Holds the parameters that are named.
        parameters: Canonical fqn -> parameter.
        new_tensors: `optimizer.<fqn>.<entry>` -> filled tensor that it did not have.
        scalars: `optimizer.<fqn>.<entry>` -> state that is no tensor.
    """
    for name, value in {**new_tensors, **scalars}.items():
        fqn, entry = split_name(name)
        optimizer.state[parameters[fqn]][entry] = value


def set_hyperparameters(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Takes over the saved hyperparameters that an optimizer has, but for how it computes a step.

    Args:
        optimizer: Its groups hold the same parameters as `groups`.
        groups: As saved.
    """
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key in group.keys() & saved["hyperparameters"].keys() - SWITCHES - {"params"}:
            value = saved["hyperparameters"][key]
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group[key], tuple) else value
