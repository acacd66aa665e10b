"""A small model with experts, and a few steps of training, for tests of layouts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.hub import HubPart
from models.moe import Moe, MoeConfig, moe_plan
from parallel import ParallelConfig, Trained, build_mesh, materialize, parallelize
from tests.parallel.small_model import batches, whole_parameters

MODELS: dict[str, dict[str, Any]] = {
    "softmax, loss": {"balance_loss": 0.3},
    "sigmoid, loss, bias, shared, dense": {
        "router_score": "sigmoid",
        "balance_loss": 0.3,
        "balance_rate": 0.01,
        "shared_expert_width": 24,
        "num_layers": 3,
        "dense_layers": (1,),
    },
}
# Deep enough for two stages on each of two ranks; the first ones give no loss.
DEEP: dict[str, Any] = {"balance_loss": 0.3, "balance_rate": 0.01, "num_layers": 4, "dense_layers": (0, 2)}


@dataclass(frozen=True)
class MoeRun:
    """What some steps of training gave, as one rank saw it."""

    losses: list[float]
    norms: list[float]
    loads: list[Any]
    dropped: list[Any]
    parameters: dict[str, Tensor]


def part_of_file(part: HubPart, tensor: Tensor) -> Tensor:
    """A part of a parameter in our layout, as a view of a file's tensor."""
    piece = tensor if part.rows is None else tensor[:, slice(*part.rows)]
    return piece.mT if part.transposed else piece


def part_of_parameter(part: HubPart, parameter: Tensor) -> Tensor:
    """A part as a view of our parameter."""
    return parameter if part.expert is None else parameter[part.expert]


def build(config: ParallelConfig, model: dict[str, Any], dtype: torch.dtype = torch.float64) -> Trained:
    """A model on the mesh of a config, with initial values."""
    model_config = MoeConfig(**{"num_layers": 2, "init_std": 0.2, **model})
    with torch.device("meta"):
        module = Moe(model_config).to(dtype)
    trained = parallelize(module, build_mesh(config), config, moe_plan(model_config))
    materialize(trained)
    return trained


def train(
    config: ParallelConfig,
    optimizer_factory: Callable[..., Any],
    model: dict[str, Any],
    num_micro_batches: int,
    steps: int = 5,
) -> MoeRun:
    """Trains one of `MODELS` from its seed."""
    trained = build(config, model)
    optimizer = trained.build_optimizer(optimizer_factory)
    losses, norms, loads, dropped = [], [], [], []
    for step in range(steps):
        result = trained.forward_backward(batches(trained.mesh, step, num_micro_batches))
        losses.append(result.loss)
        loads.append(result.expert_load)
        dropped.append(result.num_dropped)
        norms.append(trained.clip_gradients(0.5).item())
        optimizer.step()
    return MoeRun(losses, norms, loads, dropped, whole_parameters(trained))
