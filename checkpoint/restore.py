"""Holds a training state against a manifest, and fills it from one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint import optimizer_fit, optimizer_state, random_state
from checkpoint.canonical import MODEL_PREFIX, CanonicalTensors, fqn_of
from checkpoint.differences import Differences
from checkpoint.layout import local_box
from checkpoint.manifest import Manifest
from checkpoint.ranks import Ranks
from checkpoint.reader import Slice
from checkpoint.selection import Keys, Selection
from checkpoint.state import TrainState, model_tensors
from checkpoint.undo import Undo

Part = Literal["model", "optimizer", "progress", "rng"]
"""`progress` is step, num_tokens and everything stateful."""

PARTS: tuple[Part, ...] = get_args(Part)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What a load fills.

    Attributes:
        parts: Parts of the state.
        keys: Tensors of the parts; None: all.
        strict: Whether everything must fit.
        cast: Whether floating-point values may be converted to the dtype that is needed.
    """

    parts: Sequence[Part] = PARTS
    keys: Keys = None
    strict: bool = True
    cast: bool = False

    def __post_init__(self) -> None:
        """Refuses what is no part.

        Raises:
            ValueError: If there is no such part.
        """
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise ValueError(f"unknown parts {unknown}; legal: {', '.join(PARTS)}")


@dataclass(frozen=True)
class _Like:
    """Shape and dtype of a tensor that is needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Restore:
    """One load of one checkpoint into one training state: `check`, `slices`, `begin`, `finish`, in this order."""

    def __init__(
        self,
        state: TrainState,
        manifest: Manifest,
        ranks: Ranks,
        options: LoadOptions,
        elsewhere: Collection[str] = (),
    ) -> None:
        """Looks at the state; changes nothing in it.

        Args:
            state: What is to be filled.
            manifest: What there is to fill it with.
            ranks: Ranks of this load.
            options: What to fill; the rest stays as it is.
            elsewhere: Fqns of parameters that other ranks fill, those of other pipeline stages.
        """
        self.state, self.manifest, self.ranks, self.options = state, manifest, ranks, options
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
        self.new_entries: dict[str, Tensor] = {}
        self.targets = self._canonical({})
        self.generators: dict[str, Tensor] = {}
        self.undo_all: Undo | None = None
        self.attempted: list[str] = []

    def check(self) -> Differences:
        """Lists every difference."""
        differences, wanted = Differences(), self._wanted_tensors()
        stored = self.stored | {
            name: self.manifest.tensors[name] for name in self._generators() if name in self.manifest.tensors
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

    def tensors(self) -> CanonicalTensors:
        """The tensors to fill, by canonical name: the state's own, and new ones for what it does not have yet."""
        targets: dict[str, Tensor] = model_tensors(self.parameters) if "model" in self.parts else {}
        targets |= self.current.tensors
        targets = {name: each for name, each in targets.items() if self._fills(name)}
        if self.optimizer is not None:
            groups = {id(parameter): group for group in self.optimizer.param_groups for parameter in group["params"]}
            for name in self._adopted():
                parameter = self.parameters[optimizer_state.split_name(name)[0]]
                stored = self.stored[name]
                is_whole = stored.shape == self._whole_shape(optimizer_state.split_name(name)[0])
                shape = tuple(parameter.shape) if is_whole else stored.shape
                self.new_entries[name] = optimizer_state.new_entry(
                    name, stored.dtype, shape, parameter, groups[id(parameter)]
                )
        self.generators = {
            name: torch.empty(like.shape[1:], dtype=like.dtype)
            for name, like in self._generators().items()
            if name not in self.unfit
        }
        self.targets = self._canonical(targets | self.new_entries)
        return self.targets

    def slices(self) -> list[Slice]:
        """The parts of stored tensors that this rank needs, with the memory of the state that takes them."""
        row = random_state.source_rank(self.ranks.rank, self.ranks.size, self.manifest.header.world_size)
        return [
            *(
                Slice(self.selection.stored_name(name), local_box(tensor).offsets, _local(tensor))
                for name, tensor in self.tensors().items()
            ),
            *(Slice(name, (row, 0), state.unsqueeze(0)) for name, state in self.generators.items()),
        ]

    def begin(self) -> None:
        """Takes over what may still refuse, and can be put back, before any tensor is filled.

        Raises:
            ValueError: If something stateful cannot take its saved state.
        """
        header = self.manifest.header
        self.undo_all = Undo(self.state)
        if self.optimizer is not None and header.optimizer is not None:
            # Ahead of a learning-rate scheduler, which may set another rate.
            optimizer_state.set_hyperparameters(self.optimizer, header.optimizer["groups"])
        if "progress" in self.parts:
            for name, each in self.state.stateful.items():
                if name not in header.stateful:
                    continue
                self.attempted.append(name)
                try:
                    each.load_state_dict(header.stateful[name])
                except (TypeError, LookupError, AttributeError) as error:
                    raise ValueError(
                        f"stateful.{name} of the checkpoint is no state of a {type(each).__name__} "
                        f"({type(error).__name__}: {error}); nothing was changed; load it into what saved it"
                    ) from error

    def finish(self) -> None:
        """Takes over the rest, after all tensors are filled; ranks call this together."""
        header = self.manifest.header
        self.targets.fill_held()
        if self.optimizer is not None and header.optimizer is not None:
            optimizer_state.attach(self.optimizer, self.parameters, self.new_entries, self._scalars())
        if "progress" in self.parts:
            self.state.step, self.state.num_tokens = header.step, header.num_tokens
        if self.generators:
            # Last, so that nothing above can draw from them.
            random_state.restore(self.generators, self.ranks.rank, self.ranks.size, header.world_size)

    def undo(self, error: BaseException) -> None:
        """Puts back what `begin` changed on this rank, perhaps because of an error on another one.

        Args:
            error: Why; gets a note of whatever could not be put back.
        """
        if self.undo_all is not None:
            self.undo_all(self.attempted, error)

    def _wanted_tensors(self) -> dict[str, _Like]:
        model = model_tensors(self.parameters) if "model" in self.parts else {}
        held = {name: each for name, each in {**model, **self.current.tensors}.items() if self.selection.takes(name)}
        shapes = self._canonical(held)
        wanted = {name: _Like(tuple(shapes.shape(name)), tensor.dtype) for name, tensor in held.items()}
        for name in self._adopted():
            fqn, _ = optimizer_state.split_name(name)
            stored, of = self.stored[name], self.manifest.tensors.get(f"{MODEL_PREFIX}{fqn}")
            # What had the shape of its parameter when saved must have it now.
            like_parameter = of is not None and of.shape == stored.shape
            shape = self._whole_shape(fqn) if like_parameter else stored.shape
            wanted[name] = _Like(shape, stored.dtype)
        return wanted | self._generators()

    def _canonical(self, held: Mapping[str, Tensor]) -> CanonicalTensors:
        return CanonicalTensors(self.state.trained.backend, self.parameters, held)

    def _whole_shape(self, fqn: str) -> tuple[int, ...]:
        return tuple(self.state.trained.backend.whole_shape(fqn, self.parameters[fqn]))

    def _adopted(self) -> list[str]:
        """Saved entries that the optimizer can take but does not have yet."""
        return [
            name
            for name in self.stored
            if name.startswith(optimizer_state.PREFIX)
            and name not in self.current.tensors
            and name not in self.unfit
            and optimizer_state.split_name(name)[0] in self._optimized()
        ]

    def _optimized(self) -> set[str]:
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]} if self.optimizer else set()
        return {fqn for fqn, parameter in self.parameters.items() if id(parameter) in held}

    def _generators(self) -> dict[str, _Like]:
        if "rng" not in self.parts:
            return {}
        rows = self.manifest.header.world_size
        return {
            name: _Like((rows, *state.shape), state.dtype)
            for name, state in random_state.capture().items()
            if name == random_state.CPU or name in self.manifest.tensors
        }

    def _check_optimizer(self, differences: Differences) -> None:
        saved = self.manifest.header.optimizer
        if saved is None or self.optimizer is None:
            if saved is not None:
                differences.optimizer.append("the checkpoint has an optimizer, the state to load has none")
            if self.optimizer is not None:
                differences.optimizer.append("the checkpoint has no optimizer, the state to load has one")
            return
        differences.optimizer.extend(optimizer_fit.optimizer_differences(saved, self.current, self.elsewhere))
        scalars, optimized = self._scalars(), self._optimized()
        needed = [name for name in self.current.scalars if self.selection.takes(name)]
        differences.missing.extend(name for name in needed if name not in scalars)
        differences.unexpected.extend(name for name in scalars if optimizer_state.split_name(name)[0] not in optimized)
        names = [*(name for name in self.stored if name.startswith(optimizer_state.PREFIX)), *scalars]
        num_dims = {fqn: len(self._whole_shape(fqn)) for fqn in self.parameters}
        missing, unexpected = optimizer_fit.uneven_entries(names, self.current.groups, num_dims)
        differences.missing.extend(sorted(set(missing) - set(differences.missing)))
        differences.unexpected.extend(sorted(set(unexpected) - set(differences.unexpected)))

    def _scalars(self) -> dict[str, Any]:
        """The saved state of the optimizer that is no tensor, as far as it is to be filled, by the state's names."""
        saved = self.manifest.header.optimizer
        scalars = _mapping(None if saved is None else saved.get("scalars"))
        return self._own(self.selection.stored(scalars))

    def _own(self, entries: Mapping[str, T]) -> dict[str, T]:
        """Those that no other rank fills alone."""
        return {name: entry for name, entry in entries.items() if fqn_of(name) not in self.elsewhere}

    def _fills(self, name: str) -> bool:
        return self.selection.takes(name) and name not in self.unfit

    def _casts(self, stored: torch.dtype, needed: torch.dtype) -> bool:
        return self.options.cast and stored.is_floating_point and needed.is_floating_point


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("the manifest's optimizer has no mapping of scalars; it is damaged")
    return value
