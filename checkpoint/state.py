"""What a training state holds, and its canonical flat form: names that no layout changes -> tensors, and JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from checkpoint import optimizer_state, random_state
from checkpoint.canonical import MODEL_PREFIX, Backend, CanonicalTensors
from checkpoint.manifest import Header
from checkpoint.safetensors_header import CODES
from checkpoint.strict_json import digest, to_json
from parallel.config import ParallelConfig

COUNT_LIMIT = 10**18
"""Steps and tokens stay below it: names of step folders have up to 18 digits."""


class Stateful(Protocol):
    """An object whose state is JSON: a learning-rate scheduler, a data stream."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its state, equal on all ranks."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Takes a state over."""
        ...


class HasConfig(Protocol):
    """What is needed of a mesh."""

    @property
    def config(self) -> ParallelConfig:
        """The layout with every degree resolved."""
        ...


class Trained(Protocol):
    """What is needed of a parallelized model."""

    @property
    def mesh(self) -> HasConfig:
        """The mesh that it lives on."""
        ...

    @property
    def backend(self) -> Backend:
        """What knows how parameters are held."""
        ...

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Canonical fqn -> sharded parameter, tied ones once."""
        ...


@dataclass(kw_only=True)
class TrainState:
    """All that a run needs to go on.

    Every rank holds one, equal in all that is not sharded.

    Attributes:
        trained: The parallelized model.
        optimizer: Optimizes parameters of the model.
        stateful: Name -> whatever else has a state, which must be JSON.
        step: Optimizer steps done.
        num_tokens: Tokens seen.
        recipe: The run's recipe as JSON.
    """

    trained: Trained
    optimizer: torch.optim.Optimizer | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    step: int = 0
    num_tokens: int = 0
    recipe: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """A training state in the form that storage takes, and that knows nothing of modules or optimizers.

    Attributes:
        tensors: Canonical name -> tensor of the model's shape: `model.<fqn>`, `optimizer.<fqn>.<entry>`, to be read
            without gradients. Reading the first one may take all ranks.
        per_rank: Canonical name -> this rank's row of a tensor with a row for each rank: `rng.<device>`.
        header: All that is no tensor.
    """

    tensors: Mapping[str, Tensor]
    per_rank: Mapping[str, Tensor]
    header: Header

    def digests(self) -> dict[str, str]:
        """Name -> hash of each part of the header, to compare ranks by."""
        header = self.header
        parts = {
            "step": header.step,
            "num_tokens": header.num_tokens,
            "optimizer": header.optimizer,
            "recipe": header.recipe,
            **{f"stateful.{name}": state for name, state in header.stateful.items()},
        }
        return {name: digest(to_json(part, name)) for name, part in parts.items()}


def model_tensors(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The parameters' own memory under canonical names, cut off from autograd.

    Raises:
        ValueError: If some have no memory.
    """
    return {name: parameter.detach() for name, parameter in _named(parameters).items()}


def _named(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    on_meta = [fqn for fqn, parameter in parameters.items() if parameter.is_meta]
    if on_meta:
        raise ValueError(
            f"{len(on_meta)} parameters are on meta ({', '.join(on_meta[:3])} ...); call materialize first"
        )
    return {f"{MODEL_PREFIX}{fqn}": parameter for fqn, parameter in parameters.items()}


def canonical_parameters(trained: Trained) -> CanonicalTensors:
    """The parameters of a model in the model's shapes, under canonical names, cut off from autograd.

    Raises:
        ValueError: If some have no memory.
    """
    held = trained.named_parameters()
    return CanonicalTensors(trained.backend, held, model_tensors(held))


def flatten(state: TrainState, world_size: int) -> FlatState:
    """Takes a training state apart; changes nothing in it.

    Args:
        state: The state, its tensors shared with the result.
        world_size: Ranks of the job.

    Raises:
        ValueError: If some of it can be neither tensor nor JSON, a count is none, or the optimizer is not the model's.
    """
    for name, count in (("step", state.step), ("num_tokens", state.num_tokens)):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < COUNT_LIMIT:
            raise ValueError(f"{name}={count!r} must be an integer from 0 to below 10**18; set the state's {name}")
    parameters = state.trained.named_parameters()
    # Not cut off from autograd: for DTensors that takes longer than all else here.
    tensors = _named(parameters)
    optimizer: dict[str, Any] | None = None
    if state.optimizer is not None:
        read = optimizer_state.read(state.optimizer, parameters)
        tensors |= read.tensors
        optimizer = {"class": read.class_name, "groups": read.groups, "scalars": read.scalars}
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files do not hold")
    header = Header(
        step=state.step,
        num_tokens=state.num_tokens,
        world_size=world_size,
        layout=asdict(state.trained.mesh.config),
        optimizer=optimizer,
        stateful={name: _mapping(each.state_dict(), f"stateful.{name}") for name, each in state.stateful.items()},
        recipe=_mapping(state.recipe, "recipe"),
    )
    tensors_of_model = CanonicalTensors(state.trained.backend, parameters, tensors)
    return FlatState(tensors=tensors_of_model, per_rank=random_state.capture(), header=header)


def _mapping(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    copied = to_json(value, where)
    if not isinstance(copied, dict):
        raise ValueError(f"{where} must be a mapping, got {type(value).__name__}")
    return copied
