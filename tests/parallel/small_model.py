"""A small LLaMA, batches with uneven numbers of valid tokens, and a few steps of training, for tests of layouts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.plan import llama_plan
from parallel import (
    IGNORE_INDEX,
    Batch,
    Mesh,
    ParallelConfig,
    Trained,
    build_mesh,
    materialize,
    parallelize,
    units_where,
)
from parallel.ledger.live import all_live_bytes

SEQUENCE_LENGTH = 32
GLOBAL_BATCH = 24
CONFIG = LlamaConfig(num_layers=2)


def build(
    config: ParallelConfig,
    model_config: LlamaConfig = CONFIG,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    frozen: Sequence[str] = (),
    units: Callable[[str, nn.Module], bool] | None = None,
) -> Trained:
    """A model on the mesh of a config, with initial values, some parameters frozen, units by a predicate if any."""
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(model_config).to(dtype)
    for fqn in frozen:
        model.get_parameter(fqn).requires_grad_(False)
    plan = llama_plan(model_config)
    if units is not None:
        plan = replace(plan, units=units_where(model, units))
    trained = parallelize(model, mesh, config, plan)
    materialize(trained, seed=seed)
    return trained


def batches(mesh: Mesh, step: int, num_micro_batches: int = 1) -> list[Batch]:
    """This rank's part of a global batch that is the same on every mesh, cut along dp and micro-batches."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 256, (GLOBAL_BATCH, SEQUENCE_LENGTH), generator=generator)
    labels = torch.randint(0, 256, (GLOBAL_BATCH, SEQUENCE_LENGTH), generator=generator)
    # Rows have from none to all of their tokens valid, so ranks and micro-batches differ in their counts.
    valid = torch.arange(GLOBAL_BATCH) * SEQUENCE_LENGTH // (GLOBAL_BATCH - 1)
    labels[torch.arange(SEQUENCE_LENGTH)[None] >= valid[:, None]] = IGNORE_INDEX
    # Two documents a row, with the border at another place in each.
    border = torch.arange(GLOBAL_BATCH) % SEQUENCE_LENGTH + 1
    where = torch.arange(SEQUENCE_LENGTH).expand(GLOBAL_BATCH, -1)
    document_ids = (where >= border[:, None]).long()
    positions = torch.where(document_ids == 1, where - border[:, None], where)
    whole = (tokens, labels, positions, document_ids)
    mine = [each.chunk(mesh.degree("dp"))[mesh.coordinate("dp")] for each in whole]
    return [
        Batch(tokens=tokens, labels=labels, positions=positions, document_ids=documents)
        for tokens, labels, positions, documents in zip(*(each.chunk(num_micro_batches) for each in mine), strict=True)
    ]


@dataclass(frozen=True)
class Run:
    """What some steps of training gave, as one rank saw it."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor] = field(repr=False)


def whole(tensor: Tensor) -> Tensor:
    """The unsharded values of a tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def adamw(named: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as recipes use it."""
    return torch.optim.AdamW(list(named.values()), lr=1e-3, weight_decay=0.1)


def fused_adamw(named: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in one kernel."""
    return torch.optim.AdamW(list(named.values()), lr=1e-3, weight_decay=0.1, fused=True)


def sgd(named: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """SGD, which does not hide a wrong scale of gradients."""
    return torch.optim.SGD(list(named.values()), lr=0.5)


def train(
    config: ParallelConfig,
    optimizer_factory: Callable[[dict[str, torch.nn.Parameter]], torch.optim.Optimizer] = adamw,
    *,
    model: dict[str, Any] | None = None,
    num_micro_batches: int = 1,
    max_norm: float | None = None,
    steps: int = 5,
    frozen: Sequence[str] = (),
    units: Callable[[str, nn.Module], bool] | None = None,
) -> Run:
    """Trains the small model from its seed."""
    model_config = LlamaConfig(**{"num_layers": 2, **(model or {})})
    trained = build(config, model_config, frozen=frozen, units=units)
    optimizer = trained.build_optimizer(optimizer_factory)
    losses, norms = [], []
    for step in range(steps):
        losses.append(trained.forward_backward(batches(trained.mesh, step, num_micro_batches)).loss)
        norms.append(trained.clip_gradients(max_norm).item())
        optimizer.step()
    parameters = whole_parameters(trained)
    return Run(losses, norms, parameters if dist.get_rank() == 0 else {})


def whole_parameters(trained: Trained) -> dict[str, Tensor]:
    """The unsharded values of every parameter, on every rank."""
    return {fqn: whole(trained.backend.to_canonical(fqn, each)) for fqn, each in trained.named_parameters().items()}


def difference(one: Tensor | Sequence[float], other: Tensor | Sequence[float]) -> float:
    """max |a - b| / max |b|, in float64."""
    one, other = torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
    return ((one - other).abs().max() / other.abs().max()).item()


def bytes_at_rest(device: torch.device) -> int:
    """All live bytes once the threads that send have let go of what they sent, which is a little later."""
    time.sleep(0.1)
    return all_live_bytes(device)
