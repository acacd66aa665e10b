"""Training states whose every tensor is known, on any layout."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from checkpoint import TrainState
from parallel import ModelShape, ParallelConfig, ParallelPlan, Unit, build_mesh, parallelize
from parallel.none import OneProcess

PLAN = ParallelPlan(
    shape=ModelShape(
        num_layers=1, width=6, num_heads=2, num_kv_heads=2, head_dim=3, feed_forward_width=10, vocab_size=11
    ),
    tensor_parallel={"embed": "embedding", "up": "colwise", "down": "rowwise", "norm": "norm", "head": "head"},
    units=(Unit(modules=("low",)), Unit(modules=("up", "down"))),
)

LAYOUTS = {
    "fsdp 2": ParallelConfig(dp_shard=2),
    "tp 2": ParallelConfig(tp=2, dp_shard=1, sequence_parallel=False),
    "fsdp 3": ParallelConfig(dp_shard=3),
    "fsdp 2 x tp 2": ParallelConfig(dp_shard=2, tp=2, sequence_parallel=False),
    "hsdp 2 x 2": ParallelConfig(dp_replicate=2, dp_shard=2, strategy="hybrid_shard"),
    "fsdp 3 x tp 2": ParallelConfig(dp_shard=3, tp=2, sequence_parallel=False),
}
"""By name; "one process" stands for the layout without a process group."""


class Toy(nn.Module):
    """Sizes that no degree divides, shards with nothing in them, a second dtype and a frozen parameter."""

    def __init__(self, vocab_size: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.RMSNorm(6)
        self.low = nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
        self.head = nn.Linear(6, vocab_size, bias=False)
        self.scale = nn.Parameter(torch.zeros(1))
        self.pair = nn.Parameter(torch.zeros(2, 4))
        self.frozen = nn.Parameter(torch.zeros(4, 2), requires_grad=False)


@dataclass
class PlainMesh:
    config: ParallelConfig


class PlainTrained:
    """What one process without a process group trains."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mesh = PlainMesh(ParallelConfig(data_parallel="none", dp_shard=1))
        self.backend = OneProcess()

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        return dict(self.model.named_parameters())


class Counter:
    """Something stateful."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "files": ["a", "ü"], "rate": 0.1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def forget_meshes() -> None:
    """Makes DTensors forget the meshes of earlier tests on the same ranks.

    Results of operations come from a cache, and carry the mesh of the first tensor of that layout; the process
    groups of that mesh are gone.
    """
    _clear_sharding_prop_cache()


def new_state(layout: str = "one process", model: nn.Module | None = None) -> TrainState:
    """An unstepped state; all values depend on the names of tensors only after `fill`."""
    torch.manual_seed(0)
    model = Toy() if model is None else model
    if layout == "one process":
        trained: Any = PlainTrained(model)
    else:
        mesh = build_mesh(LAYOUTS[layout], "cpu")
        trained = parallelize(model, mesh, LAYOUTS[layout], PLAN)
    return TrainState(trained=trained, optimizer=new_optimizer(trained), stateful={"data": Counter()})


def new_optimizer(trained: Any, **options: Any) -> torch.optim.Optimizer:
    named = {fqn: each for fqn, each in trained.named_parameters().items() if each.requires_grad}
    groups: list[dict[str, Any]] = [
        {"params": [each for each in named.values() if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in named.values() if each.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, **options)


def step(state: TrainState) -> None:
    """One step of the optimizer, with gradients that do not matter."""
    assert state.optimizer is not None
    for each in state.trained.named_parameters().values():
        if each.requires_grad:
            each.grad = torch.ones_like(each)
    state.optimizer.step()
    state.optimizer.zero_grad()


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """Parameters and optimizer state by name, read without the code under test."""
    found: dict[str, Tensor] = {}
    for fqn, each in state.trained.named_parameters().items():
        found[f"model.{fqn}"] = each.detach()
        if state.optimizer is not None:
            for entry, value in state.optimizer.state.get(each, {}).items():
                found[f"optimizer.{fqn}.{entry}"] = value
    return found


def value_of(name: str, like: Tensor, seed: int) -> Tensor:
    """The whole tensor of a name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
    values = torch.randn(tuple(like.shape), generator=generator, dtype=torch.float32)
    if name.endswith(".step"):
        values = values.abs().mul(10).ceil()
    elif name.endswith(".exp_avg_sq"):
        values = values.abs()
    return values.to(like.dtype)


def fill(state: TrainState, seed: int = 0) -> TrainState:
    """Steps once, so that there is optimizer state, and gives all tensors their known values."""
    step(state)
    for name, tensor in tensors_of(state).items():
        whole = value_of(name, tensor, seed)
        if isinstance(tensor, DTensor):
            split = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(split.to_local())
        else:
            tensor.copy_(whole)
    state.step, state.num_tokens, state.recipe = 42 + seed, 1000 + seed, {"name": "toy", "sizes": [1, 2]}
    counter = state.stateful["data"]
    assert isinstance(counter, Counter)
    counter.position = 7 + seed
    return state


def wrong_tensors(state: TrainState, seed: int = 0) -> list[str]:
    """Names of tensors that do not have their known values, bit for bit, and of expected ones that are not there."""
    found = tensors_of(state)
    wrong = []
    for name, tensor in found.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(whole, value_of(name, tensor, seed)):
            wrong.append(name)
    trainable = {fqn: each for fqn, each in state.trained.named_parameters().items() if each.requires_grad}
    expected = [f"optimizer.{fqn}.{entry}" for fqn in trainable for entry in ("step", "exp_avg", "exp_avg_sq")]
    if state.optimizer is not None:
        wrong += [f"{name} is not there" for name in expected if name not in found]
    return wrong
