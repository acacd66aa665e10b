"""Measures what a rank holds of a training state, from the live tensors themselves."""

import gc
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallel.replicas import local_part
from parallel.trained import Trained


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    """Bytes that this rank holds, by kind.

    Attributes:
        parameters: Its shards of the parameters.
        unsharded: Parameters that are gathered right now, in the dtype of the computation.
        gradients: Its shards of the gradients.
        optimizer_state: Its shards of what the optimizer keeps.
    """

    parameters: int
    unsharded: int
    gradients: int
    optimizer_state: int


class LiveMeter:
    """Measures a model and its optimizer at any moment, within a step too.

    It takes note of the sharded parameters when it is made, between steps: within one, the model shows the gathered
    parameters in their place.
    """

    def __init__(self, trained: Trained, optimizer: Optimizer | None = None) -> None:
        """Takes note of the sharded parameters.

        Args:
            trained: The model, between two steps.
            optimizer: Its optimizer, if there is one already.
        """
        self._model, self._backend, self._optimizer = trained.source, trained.backend, optimizer
        # A rank that has both ends of a pipeline holds a second one of what is tied.
        copies = [] if trained.pipeline is None else trained.pipeline.held_twice
        self._sharded = list({id(each): each for each in (*trained.named_parameters().values(), *copies)}.values())

    def measure(self) -> LiveBytes:
        """What this rank holds right now."""
        own = {id(parameter) for parameter in self._sharded}
        state = self._optimizer.state.values() if self._optimizer is not None else ()
        return LiveBytes(
            parameters=storage_bytes(self._sharded),
            unsharded=storage_bytes(
                [*(each for each in self._model.parameters() if id(each) not in own), *self._backend.gathered()]
            ),
            gradients=storage_bytes(each.grad for each in self._sharded if each.grad is not None),
            optimizer_state=storage_bytes(
                value for entries in state for value in entries.values() if isinstance(value, Tensor)
            ),
        )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory behind the local parts of some tensors; what they share counts once.

    Args:
        tensors: Tensors or DTensors.
    """
    storages = {}
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def all_live_bytes(device: torch.device) -> int:
    """Bytes behind every tensor of this process on a device that Python can reach, gradients included.

    Args:
        device: The device.
    """
    gc.collect()
    # isinstance would ask lazy objects of other libraries to load themselves.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    # A gradient that only autograd holds has no Python object of its own.
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    # By where its storage lies: fake tensors, which a compiler leaves behind, have one on meta.
    return storage_bytes(each for each in tensors if local_part(each).untyped_storage().device.type == device.type)
