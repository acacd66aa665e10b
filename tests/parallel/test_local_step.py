"""An optimizer steps on local shards and shows DTensors to everybody else."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from models.llama.config import LlamaConfig
from parallel import ParallelConfig
from tests.models.moe.small_moe import build as build_with_experts
from tests.parallel.small_model import batches, build, difference, whole, whole_parameters
from tests.ranks import run_ranks

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "fused adamw": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "foreach adamw": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "uneven shards": (3, {}),
    "two meshes": (4, {"tp": 2, "sequence_parallel": False}),
}
# Its vocabulary gives 3 ranks uneven shards, and a norm of 64 gives the last of 3 ranks fewer rows.
MODEL = LlamaConfig(num_layers=1, vocab_size=257)


def steps_on_shards_and_through_dtensor(layout: dict[str, Any], name: str) -> tuple[float, set[str], bool]:
    """The largest difference between both ways, the kinds of the state's tensors, and whether groups kept theirs."""
    optimizer_class, options = OPTIMIZERS[name]
    finals, kinds, kept = [], set[str](), True
    for local in (True, False):
        trained = build(ParallelConfig(**layout), MODEL)
        make = lambda named: optimizer_class(list(named.values()), **options)  # noqa: E731
        optimizer = trained.build_optimizer(make) if local else make(trained.named_parameters())
        for step in range(2):
            trained.forward_backward(batches(trained.mesh, step))
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
        named = trained.named_parameters()
        finals.append({fqn: whole(parameter) for fqn, parameter in named.items()})
        if local:
            kept = all(a is b for a, b in zip(optimizer.param_groups[0]["params"], named.values(), strict=True))
            for parameter, entries in dict[Any, Any](optimizer.state).items():
                for value in entries.values():
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        kinds.add(type(value).__name__)
                        kept &= isinstance(value, DTensor) and value.placements == parameter.placements
                        kept &= value.shape == parameter.shape
    worst = max((finals[0][fqn] - finals[1][fqn]).abs().max().item() for fqn in finals[0])
    return worst, kinds, kept


def every_optimizer(layout: dict[str, Any], names: list[str]) -> dict[str, tuple[float, set[str], bool]]:
    return {name: steps_on_shards_and_through_dtensor(layout, name) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_on_shards_is_the_step_through_dtensor(layout: str) -> None:
    world_size, fields = LAYOUTS[layout]
    # torch's own foreach kernels refuse DTensors of two meshes, so there is nothing to compare with.
    names = [name for name in OPTIMIZERS if not (name.startswith("foreach") and layout == "two meshes")]
    for outcomes in run_ranks(world_size, every_optimizer, fields, names):
        for name, (worst, kinds, kept) in outcomes.items():
            assert worst == 0.0, name
            assert kinds <= {"DTensor"}, name
            assert kept, name


MIXES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain beside split": ({"data_parallel": "ddp", "tp": 2, "sequence_parallel": False}, False),
    "flat beside split": ({"data_parallel": "fsdp1", "tp": 2, "sequence_parallel": False}, False),
    "experts on their own mesh": ({"ep": 2, "tp": 2}, True),
}
KERNELS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.mark.parametrize(
    "mix", [next(iter(MIXES)), *(pytest.param(mix, marks=pytest.mark.slow) for mix in [*MIXES][1:])]
)
def test_every_kernel_steps_and_clips_on_any_mix_of_meshes(mix: str) -> None:
    fields, has_experts = MIXES[mix]
    everyone = run_ranks(4, every_kernel, fields, has_experts)
    for found, num_meshes, only_plain in everyone:
        assert num_meshes > 1
        assert only_plain
        norms, parameters = found["loop"]
        assert norms == everyone[0][0]["loop"][0]
        for kernel in ("foreach", "fused"):
            assert found[kernel][0] == pytest.approx(norms, rel=1e-13)
            worst = {fqn: difference(found[kernel][1][fqn], values) for fqn, values in parameters.items()}
            assert max(worst.values()) < 1e-12, (kernel, worst)


def adamw_with(options: dict[str, bool], named: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(named.values()), **options)  # type: ignore[arg-type]  # switches alone


def every_kernel(fields: dict[str, Any], has_experts: bool) -> tuple[dict[str, Any], int, bool]:
    """Norms and parameters of two clipped steps, on how many meshes those lie, and whether steps saw plain tensors."""
    found, seen = {}, set[type]()
    for kernel, options in KERNELS.items():
        config = ParallelConfig(**fields)
        trained = build_with_experts(config, {}) if has_experts else build(config, MODEL)
        optimizer = trained.build_optimizer(partial(adamw_with, options))
        optimizer.register_step_pre_hook(
            lambda optim, *_: seen.update(type(each.data) for group in optim.param_groups for each in group["params"])
        )
        norms = []
        for step in range(2):
            trained.forward_backward(batches(trained.mesh, step))
            norms.append(trained.clip_gradients(0.05).item())
            optimizer.step()
        found[kernel] = norms, whole_parameters(trained)
    held = trained.named_parameters().values()
    meshes = {each.device_mesh if isinstance(each, DTensor) else trained.backend.sharded_views(each) for each in held}
    return found, len(meshes), seen == {torch.Tensor}


def test_a_step_that_raises_half_way_can_be_done_again() -> None:
    assert run_ranks(2, step_raises_then_works) == [True, True]


def step_raises_then_works() -> bool:
    trained = build(ParallelConfig(), MODEL)
    optimizer = trained.build_optimizer(lambda named: torch.optim.SGD(list(named.values()), lr=0.1))
    trained.forward_backward(batches(trained.mesh, 0))
    before = whole(trained.named_parameters()["norm.weight"])
    kept, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], None
    try:
        optimizer.step()
    except TypeError:
        optimizer.param_groups[0]["lr"] = kept
        optimizer.step()
    trained.check_optimizer(optimizer)
    return not torch.equal(whole(trained.named_parameters()["norm.weight"]), before)


def test_state_that_a_user_replaces_between_steps_is_used() -> None:
    assert run_ranks(2, replaced_state_is_used) == [True, True]


def replaced_state_is_used() -> bool:
    trained = build(ParallelConfig(), MODEL)
    optimizer = trained.build_optimizer(lambda named: torch.optim.SGD(list(named.values()), lr=0.1, momentum=0.9))
    for step in range(2):
        trained.forward_backward(batches(trained.mesh, step))
        optimizer.step()
    parameter = trained.named_parameters()["norm.weight"]
    optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, 10.0)}
    before = whole(parameter)
    trained.forward_backward(batches(trained.mesh, 2))
    optimizer.step()
    # 0.1 x 0.9 x 10, beside a gradient that is far smaller.
    return bool(((before - whole(parameter)) > 0.8).all())


def what_is_refused() -> list[str]:
    trained = build(ParallelConfig(), MODEL)
    messages = []
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(ValueError) as caught:
            trained.build_optimizer(lambda named, kind=kind: kind(list(named.values())))  # type: ignore[misc]
        messages.append(str(caught.value))
    optimizer = trained.build_optimizer(lambda named: torch.optim.SGD(list(named.values()), lr=0.1))
    with pytest.raises(ValueError) as caught:
        optimizer.step(lambda: 0.0)
    messages.append(str(caught.value))
    optimizer = trained.build_optimizer(lambda named: RowOptimizer(list(named.values()), {}))
    trained.forward_backward(batches(trained.mesh, 0))
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    return [*messages, str(caught.value)]


class RowOptimizer(torch.optim.Optimizer):
    """Keeps a number for each row of a matrix."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row"] = parameter.detach().flatten(1).sum(1) if parameter.dim() > 1 else None


def test_what_would_depend_on_the_layout_is_refused() -> None:
    for lbfgs, adafactor, closure, rows in run_ranks(2, what_is_refused):
        assert "LBFGS looks at whole matrices" in lbfgs
        assert "Adafactor looks at whole matrices" in adafactor
        assert "takes no closure here" in closure
        assert "RowOptimizer keeps state of the shape" in rows
