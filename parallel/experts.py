"""Adds up the load of a model's experts over ranks, and lets the model answer it once an optimizer step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.plan import ModelShape
from parallel.replicas import local_part, own_part

if TYPE_CHECKING:
    from parallel.trained import Trained

# L layers with experts, E experts


@runtime_checkable
class HasExperts(Protocol):
    """A model that counts the tokens which come to its experts."""

    def take_expert_load(self) -> Tensor:
        """Valid tokens that came to each expert in forwards with gradients since this was last called, int64 [L, E]."""
        ...

    def balance_updates(self, load: Tensor) -> Mapping[str, Tensor]:
        """What a step adds to parameters that no gradient moves, by fqn; whole tensors.

        Args:
            load: The load of the global batch, int64 [L, E].
        """
        ...


def forget_load(trained: "Trained") -> None:
    """Drops what was counted outside of steps.

    Args:
        trained: What is about to take a step.
    """
    trained.expert_load = None
    for part in trained.parts:
        if isinstance(part, HasExperts):
            part.take_expert_load()


def sum_load(trained: "Trained") -> tuple[tuple[int, ...], ...] | None:
    """The load of a step's global batch, by layer and expert, equal on every rank; None for a dense model.

    Args:
        trained: What has just taken a step; keeps the load until its optimizer steps.
    """
    if not isinstance(trained.source, HasExperts):
        return None
    loads = [part.take_expert_load() for part in trained.parts if isinstance(part, HasExperts)]
    load = torch.cat([each.to(trained.mesh.device) for each in loads])
    dist.all_reduce(load, group=trained.mesh.group("loss"))
    trained.expert_load = load
    if trained.mesh.degree("pp") > 1:
        load = _of_all_stages(trained, load)
    return tuple(tuple(layer) for layer in load.tolist())


def num_dropped(load: tuple[tuple[int, ...], ...], shape: ModelShape, num_valid_tokens: int) -> int:
    """How often, over all layers, an expert that was picked for a valid token had no room for it.

    Args:
        load: Valid tokens that came to each expert, by layer.
        shape: Says how many experts are picked for a token.
        num_valid_tokens: Valid tokens of the global batch.
    """
    return len(load) * num_valid_tokens * shape.num_experts_per_token - sum(map(sum, load))


def _of_all_stages(trained: "Trained", load_LE: Tensor) -> Tensor:
    """The load of every layer, out of those of this rank's pipeline stages."""
    own = dict(trained.source.named_modules())
    layers = [block.fqn for block in trained.plan.blocks if block.has_experts]
    whole_LE = load_LE.new_zeros(len(layers), load_LE.shape[1])
    whole_LE[[index for index, fqn in enumerate(layers) if fqn in own]] = load_LE
    dist.all_reduce(whole_LE, group=trained.mesh.group("pp"))
    return whole_LE


@torch.no_grad()
def balance(trained: "Trained") -> None:
    """Moves the parameters that answer the load of the last step, once; called after the optimizer's step.

    Args:
        trained: What took the step.
    """
    load, trained.expert_load = trained.expert_load, None
    if load is None or not isinstance(trained.source, HasExperts):
        return
    updates = trained.source.balance_updates(load)
    named = trained.named_parameters() if updates else {}
    for fqn, update in updates.items():
        canonical = trained.backend.to_canonical(fqn, named[fqn])
        local_part(canonical).add_(own_part(canonical, update.to(canonical.device)))
        trained.backend.from_canonical(fqn, canonical, named[fqn])
