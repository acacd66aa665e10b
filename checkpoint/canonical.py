"""Tensors in the shapes of the model, whatever part of them a rank holds and how."""

from collections.abc import ItemsView, Iterator, Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from checkpoint import optimizer_state

MODEL_PREFIX = "model."


class Backend(Protocol):
    """What is needed of a data-parallel backend; `parallel.backend` says what each member does."""

    holds_canonical: bool

    def whole_shape(self, fqn: str, parameter: Tensor, /) -> torch.Size:
        """Shape of a whole parameter."""
        ...

    def to_canonical(self, fqn: str, held: Tensor, /) -> Tensor:
        """A tensor or DTensor of that shape."""
        ...

    def from_canonical(self, fqn: str, canonical: Tensor, held: Tensor, /) -> None:
        """The way back."""
        ...


class CanonicalTensors(Mapping[str, Tensor]):
    """What a rank holds, as tensors and DTensors of the model's shapes.

    They are made when the first one is asked for, all at once: ranks that share them must do so together. Most backends
    hold them in this form; others make copies, of this rank's shards.
    """

    def __init__(self, backend: Backend, parameters: Mapping[str, nn.Parameter], held: Mapping[str, Tensor]) -> None:
        """Makes nothing yet.

        Args:
            backend: Knows what it has made of the parameters.
            parameters: Canonical fqn -> parameter.
            held: `model.<fqn>` or `optimizer.<fqn>.<entry>` -> what this rank holds of it.
        """
        self._backend, self._parameters, self._held = backend, parameters, held

    def __getitem__(self, name: str) -> Tensor:
        """One of them."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self._held)

    def __len__(self) -> int:
        """How many they are."""
        return len(self._held)

    def items(self) -> ItemsView[str, Tensor]:
        """All of them, in less time than name by name."""
        return self._tensors.items()

    def shape(self, name: str) -> torch.Size:
        """The shape of one of them, without making it."""
        held, fqn = self._held[name], fqn_of(name)
        return self._backend.whole_shape(fqn, self._parameters[fqn]) if self._is_split(name) else held.shape

    def fill_held(self) -> None:
        """Fills what the rank holds from what has been filled in here; ranks call this together."""
        for name, held in self._held.items():
            if self._is_split(name):
                self._backend.from_canonical(fqn_of(name), self._tensors[name], held)

    @cached_property
    @torch.no_grad()
    def _tensors(self) -> dict[str, Tensor]:
        return {
            name: self._backend.to_canonical(fqn_of(name), held) if self._is_split(name) else held
            for name, held in self._held.items()
        }

    def _is_split(self, name: str) -> bool:
        """Whether a tensor is held otherwise: a parameter, or laid out like one; counts of steps are not."""
        if self._backend.holds_canonical:
            return False
        held = self._held[name]
        return held.dim() > 0 and held.shape == self._parameters[fqn_of(name)].shape


def by_fqn(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters among canonical tensors, by fqn."""
    return {
        name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(MODEL_PREFIX)
    }


def fqn_of(name: str) -> str:
    """The parameter that a canonical name is about.

    Args:
        name: `model.<fqn>` or `optimizer.<fqn>.<entry>`.
    """
    return name.removeprefix(MODEL_PREFIX) if name.startswith(MODEL_PREFIX) else optimizer_state.split_name(name)[0]
