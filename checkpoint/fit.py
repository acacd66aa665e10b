"""Holds a training state against a manifest: what the one needs, what the other has, where they differ."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from checkpoint import optimizer_fit, optimizer_state, random_state
from checkpoint.canonical import MODEL_PREFIX, CanonicalTensors, fqn_of
from checkpoint.differences import Differences
from checkpoint.load_options import LoadOptions
from checkpoint.manifest import Manifest
from checkpoint.selection import Selection
from checkpoint.state import TrainState, model_tensors

T = TypeVar("T")


@dataclass(frozen=True)
class Like:
    """Shape and dtype of a tensor that is needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Fit:
    """A training state beside a checkpoint that it may be filled from.

    Attributes:
        unfit: Names of tensors that are not filled, since they do not fit; `check` finds them.
    """

    def __init__(
        self, state: TrainState, manifest: Manifest, options: LoadOptions, elsewhere: Collection[str] = ()
    ) -> None:
        """Looks at the state; changes nothing in it.

        Args:
            state: What is to be filled.
            manifest: What there is to fill it with.
            options: What to fill; the rest stays as it is.
            elsewhere: Fqns of parameters that other ranks fill, those of other pipeline stages.
        """
        self.state, self.manifest, self.options = state, manifest, options
        self.parts, self.selection = options.parts, Selection(options.keys)
        self.elsewhere = elsewhere
        self.stored = self._own(self.selection.stored(manifest.tensors))
        self.unfit: set[str] = set()
        self.parameters = state.trained.named_parameters()
        self.optimizer = state.optimizer if "optimizer" in self.parts else None
        self.current = (
            optimizer_state.OptimizerState()
            if self.optimizer is None
            else optimizer_state.read(self.optimizer, self.parameters)
        )

    def check(self) -> Differences:
        """Lists every difference."""
        differences, wanted = Differences(), self._wanted_tensors()
        stored = self.stored | {
            name: self.manifest.tensors[name] for name in self.generators() if name in self.manifest.tensors
        }
        self.selection.check(wanted, self.selection.stored(self.manifest.tensors))
        prefixes = {"model": MODEL_PREFIX, "optimizer": optimizer_state.PREFIX}
        chosen = tuple(prefix for part, prefix in prefixes.items() if part in self.parts)
        differences.missing.extend(name for name in wanted if name not in stored)
        differences.unexpected.extend(name for name in stored if name.startswith(chosen) and name not in wanted)
        self.unfit.update(differences.missing)
        for name, like in wanted.items():
            if name in stored and stored[name].shape != like.shape:
                differences.shapes.append(f"{name}: {list(stored[name].shape)}, needed {list(like.shape)}")
                self.unfit.add(name)
            if name in stored and stored[name].dtype != like.dtype and not self._casts(stored[name].dtype, like.dtype):
                differences.dtypes.append(f"{name}: {stored[name].dtype}, needed {like.dtype}")
                self.unfit.add(name)
        if "optimizer" in self.parts:
            self._check_optimizer(differences)
        if "progress" in self.parts:
            saved, current = self.manifest.header.stateful, self.state.stateful
            differences.missing.extend(f"stateful.{name}" for name in current if name not in saved)
            differences.unexpected.extend(f"stateful.{name}" for name in saved if name not in current)
        return differences

    def held(self) -> dict[str, Tensor]:
        """The state's own tensors that are to be filled, as this rank holds them."""
        return {name: each for name, each in self._all_held.items() if name not in self.unfit}

    def adopted(self) -> list[str]:
        """Saved entries that the optimizer can take but does not have yet."""
        optimized = self._optimized()
        return [
            name
            for name in self.stored
            if name.startswith(optimizer_state.PREFIX)
            and name not in self.current.tensors
            and name not in self.unfit
            and optimizer_state.split_name(name)[0] in optimized
        ]

    def generators(self) -> dict[str, Like]:
        """The states of random-number generators, a row for each rank that saved."""
        if "rng" not in self.parts:
            return {}
        rows = self.manifest.header.world_size
        return {
            name: Like((rows, *state.shape), state.dtype)
            for name, state in random_state.capture().items()
            if name == random_state.CPU or name in self.manifest.tensors
        }

    def scalars(self) -> dict[str, Any]:
        """The saved state of the optimizer that is no tensor, as far as it is to be filled, by the state's names."""
        saved = self.manifest.header.optimizer
        scalars = _mapping(None if saved is None else saved.get("scalars"))
        return self._own(self.selection.stored(scalars))

    def whole_shape(self, fqn: str) -> tuple[int, ...]:
        """The shape of a parameter in the model."""
        return tuple(self.state.trained.backend.whole_shape(fqn, self.parameters[fqn]))

    def canonical(self, held: Mapping[str, Tensor]) -> CanonicalTensors:
        """What this rank holds of some tensors, in the shapes of the model."""
        return CanonicalTensors(self.state.trained.backend, self.parameters, held)

    def _wanted_tensors(self) -> dict[str, Like]:
        held = self._all_held
        shapes = self.canonical(held)
        wanted = {name: Like(tuple(shapes.shape(name)), tensor.dtype) for name, tensor in held.items()}
        for name in self.adopted():
            fqn, _ = optimizer_state.split_name(name)
            stored, of = self.stored[name], self.manifest.tensors.get(f"{MODEL_PREFIX}{fqn}")
            # What had the shape of its parameter when saved must have it now.
            like_parameter = of is not None and of.shape == stored.shape
            shape = self.whole_shape(fqn) if like_parameter else stored.shape
            wanted[name] = Like(shape, stored.dtype)
        return wanted | self.generators()

    @cached_property
    def _all_held(self) -> dict[str, Tensor]:
        model = model_tensors(self.parameters) if "model" in self.parts else {}
        return {name: each for name, each in {**model, **self.current.tensors}.items() if self.selection.takes(name)}

    def _check_optimizer(self, differences: Differences) -> None:
        saved = self.manifest.header.optimizer
        if saved is None or self.optimizer is None:
            if saved is not None:
                differences.optimizer.append("the checkpoint has an optimizer, the state to load has none")
            if self.optimizer is not None:
                differences.optimizer.append("the checkpoint has no optimizer, the state to load has one")
            return
        differences.optimizer.extend(optimizer_fit.optimizer_differences(saved, self.current, self.elsewhere))
        scalars, optimized = self.scalars(), self._optimized()
        needed = [name for name in self.current.scalars if self.selection.takes(name)]
        differences.missing.extend(name for name in needed if name not in scalars)
        differences.unexpected.extend(name for name in scalars if optimizer_state.split_name(name)[0] not in optimized)
        names = [*(name for name in self.stored if name.startswith(optimizer_state.PREFIX)), *scalars]
        num_dims = {fqn: len(self.whole_shape(fqn)) for fqn in self.parameters}
        missing, unexpected = optimizer_fit.uneven_entries(names, self.current.groups, num_dims)
        differences.missing.extend(sorted(set(missing) - set(differences.missing)))
        differences.unexpected.extend(sorted(set(unexpected) - set(differences.unexpected)))

    def _optimized(self) -> set[str]:
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]} if self.optimizer else set()
        return {fqn for fqn, parameter in self.parameters.items() if id(parameter) in held}

    def _own(self, entries: Mapping[str, T]) -> dict[str, T]:
        """Those that no other rank fills alone."""
        return {name: entry for name, entry in entries.items() if fqn_of(name) not in self.elsewhere}

    def _casts(self, stored: torch.dtype, needed: torch.dtype) -> bool:
        return self.options.cast and stored.is_floating_point and needed.is_floating_point


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("the manifest's optimizer has no mapping of scalars; it is damaged")
    return value
