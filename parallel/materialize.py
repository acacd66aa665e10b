"""Gives the parameters of a model on meta their values, which depend on the seed and on their names alone."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from parallel.replaced import mark_replaced
from parallel.replicas import local_part, own_part, verify_replicas
from parallel.tensor_parallel import tie
from parallel.trained import Trained


@runtime_checkable
class InitializesParameters(Protocol):
    """A model, or a module within one, that knows the distribution of each of its parameters."""

    def init_parameter(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fills a whole float32 tensor in place.

        Args:
            fqn: The parameter's name in the whole model.
            tensor: The tensor to fill.
            generator: The only source of randomness to use, on the tensor's device.
        """
        ...


def materialize(trained: Trained, seed: int = 0, *, draws: Callable[[str], bool] = lambda fqn: True) -> None:
    """Allocates the parameters on the mesh's device and draws their initial values.

    Every rank draws each whole parameter from a generator seeded by (seed, fqn) and keeps its part, so values
    are bitwise equal on every mesh of the same device type, and one parameter is held whole at a time.
    Afterwards replicas are compared by hash. The innermost module around a parameter that has an `init_parameter` is
    asked for it.

    Args:
        trained: What `parallelize` returned.
        seed: Seed of the run.
        draws: Tells by fqn which parameters get values; the others are NaN until a checkpoint brings some.

    Raises:
        TypeError: If a parameter has no module around it with an `init_parameter`.
        ValueError: If replicas differ afterwards.
    """
    # Not on the CPU where parameters are offloaded to it: offloading must not change the values.
    device, modules = trained.mesh.device, dict(trained.source.named_modules(remove_duplicate=False))
    asked = {fqn: _initializer(modules, fqn) for fqn in trained.named_parameters() if draws(fqn)}
    _allocate(trained)
    for fqn, parameter in trained.named_parameters().items():
        if fqn in asked:
            # In a function, so that one whole tensor is gone before the next is made.
            _keep_part(parameter, _draw(asked[fqn], fqn, parameter.shape, seed, device))
        else:
            local_part(parameter).fill_(float("nan"))
    trained.wrap_after_materialize()
    verify_replicas(trained.named_parameters(), trained.mesh, trained.backend.sharded_views)


def allocate(trained: Trained, *, clear: bool = True) -> None:
    """Allocates the parameters on the mesh's device for values that a checkpoint brings.

    Args:
        trained: What `parallelize` returned.
        clear: Whether they are NaN until then, so that what a load leaves out shows at once. False is faster, for a
            load that fills all of them or raises.
    """
    _allocate(trained)
    if clear:
        for parameter in trained.named_parameters().values():
            local_part(parameter).fill_(float("nan"))
    trained.wrap_after_materialize()


def _allocate(trained: Trained) -> None:
    if not any(parameter.is_meta for parameter in trained.source.parameters()):
        return  # values are there, and a wrapper may hold on to them
    with mark_replaced(trained.source):
        trained.source.to_empty(device=trained.parameter_device)
        if trained.config.pp == 1:
            tie(trained.source, trained.plan.tied)


def seed_of(seed: int, fqn: str) -> int:
    """Seed of one parameter's generator.

    Args:
        seed: Seed of the run.
        fqn: The parameter's name.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}:{fqn}".encode()).digest()[:7], "big")


def _initializer(modules: Mapping[str, nn.Module], fqn: str) -> InitializesParameters:
    """The innermost module around a parameter that knows how it begins."""
    around = fqn
    while around:
        around = around.rpartition(".")[0]
        module = modules.get(around)
        if isinstance(module, InitializesParameters):
            return module
    raise TypeError(
        f"{type(modules['']).__name__} has no init_parameter(fqn, tensor, generator), so the values of {fqn} cannot be "
        "drawn; add that method, or call allocate and load a checkpoint"
    )


def _draw(model: InitializesParameters, fqn: str, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    whole = torch.empty(shape, dtype=torch.float32, device=device)
    model.init_parameter(fqn, whole, torch.Generator(device).manual_seed(seed_of(seed, fqn)))
    return whole


@torch.no_grad()
def _keep_part(parameter: nn.Parameter, whole: Tensor) -> None:
    local_part(parameter).copy_(own_part(parameter, whole))
