"""Holds a training state against a manifest, and fills it from one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from checkpoint import optimizer_state, random_state
from checkpoint.manifest import Manifest
from checkpoint.ranks import Ranks
from checkpoint.state import MODEL_PREFIX, TrainState, model_tensors

Part = Literal["model", "optimizer", "progress", "rng"]
"""`progress` is step, num_tokens and everything stateful."""

PARTS: tuple[Part, ...] = get_args(Part)

MAX_LISTED = 40
"""Entries that a message lists of each kind of difference."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Where a training state and a checkpoint do not fit.

    Attributes:
        missing: Names that the state needs and the checkpoint lacks.
        unexpected: Names of the checkpoint for which the state has no place.
        shapes: Names whose shapes differ, with both.
        dtypes: Names whose dtypes differ, with both.
        groups: How the optimizer's groups differ.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """The differences in words, empty if there are none."""
        headings = {
            "missing": "missing from the checkpoint",
            "unexpected": "in the checkpoint only",
            "shapes": "of another shape",
            "dtypes": "of another dtype",
            "groups": "optimizer groups",
        }
        lines: list[str] = []
        for each in fields(self):
            entries: list[str] = getattr(self, each.name)
            if entries:
                lines.append(f"{headings[each.name]} ({len(entries)}):")
                lines += [f"  {entry}" for entry in entries[:MAX_LISTED]]
                if len(entries) > MAX_LISTED:
                    lines.append(f"  ... and {len(entries) - MAX_LISTED} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Like:
    """Shape and dtype of a tensor that is needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Like":
        return cls(tuple(tensor.shape), tensor.dtype)


class Restore:
    """One load of one checkpoint into one training state: first `check`, then `tensors`, then `finish`."""

    def __init__(self, state: TrainState, manifest: Manifest, ranks: Ranks, parts: Sequence[Part]) -> None:
        """Looks at the state; changes nothing in it.

        Args:
            state: What is to be filled.
            manifest: What there is to fill it with.
            ranks: Ranks of this load.
            parts: Parts of the state to fill; the others stay as they are.
        """
        self.state, self.manifest, self.ranks, self.parts = state, manifest, ranks, parts
        self.parameters = state.trained.named_parameters()
        self.optimizer = state.optimizer if "optimizer" in parts else None
        self.current = (
            optimizer_state.OptimizerState()
            if self.optimizer is None
            else optimizer_state.read(self.optimizer, self.parameters)
        )
        self.new_entries: dict[str, Tensor] = {}
        self.generators: dict[str, Tensor] = {}

    def check(self) -> Differences:
        """Lists every difference."""
        differences = Differences()
        wanted = self._wanted_tensors()
        prefixes = {"model": MODEL_PREFIX, "optimizer": optimizer_state.PREFIX}
        chosen = tuple(prefix for part, prefix in prefixes.items() if part in self.parts)
        stored = self.manifest.tensors
        differences.missing.extend(name for name in wanted if name not in stored)
        differences.unexpected.extend(name for name in stored if name.startswith(chosen) and name not in wanted)
        for name, like in wanted.items():
            if name in stored and stored[name].shape != like.shape:
                differences.shapes.append(f"{name}: {list(stored[name].shape)}, needed {list(like.shape)}")
            if name in stored and stored[name].dtype != like.dtype:
                differences.dtypes.append(f"{name}: {stored[name].dtype}, needed {like.dtype}")
        if "optimizer" in self.parts:
            self._check_optimizer(differences)
        if "progress" in self.parts:
            saved, current = self.manifest.header.stateful, self.state.stateful
            differences.missing.extend(f"stateful.{name}" for name in current if name not in saved)
            differences.unexpected.extend(f"stateful.{name}" for name in saved if name not in current)
        return differences

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to fill, by canonical name: the state's own, and new ones for what it does not have yet."""
        targets: dict[str, Tensor] = model_tensors(self.parameters) if "model" in self.parts else {}
        targets |= self.current.tensors
        if self.optimizer is not None:
            groups = {id(parameter): group for group in self.optimizer.param_groups for parameter in group["params"]}
            for name in self._adopted():
                parameter = self.parameters[optimizer_state.split_name(name)[0]]
                stored = self.manifest.tensors[name]
                self.new_entries[name] = optimizer_state.new_entry(
                    name, stored.dtype, stored.shape, parameter, groups[id(parameter)]
                )
        self.generators = {name: torch.empty(like.shape, dtype=like.dtype) for name, like in self._generators().items()}
        return targets | self.new_entries | self.generators

    def finish(self) -> None:
        """Takes over what is no tensor, and new tensors, after all tensors are filled."""
        header = self.manifest.header
        if self.optimizer is not None and header.optimizer is not None:
            optimizer_state.attach(
                self.optimizer,
                self.parameters,
                self.new_entries,
                header.optimizer["scalars"],
                header.optimizer["groups"],
            )
        if "progress" in self.parts:
            for name, each in self.state.stateful.items():
                each.load_state_dict(header.stateful[name])
            self.state.step, self.state.num_tokens = header.step, header.num_tokens
        if "rng" in self.parts:
            # Last, so that nothing above can draw from them.
            random_state.restore(self.generators, self.ranks.rank, self.ranks.size, header.world_size)

    def _wanted_tensors(self) -> dict[str, _Like]:
        model = model_tensors(self.parameters) if "model" in self.parts else {}
        wanted = {name: _Like.of(tensor) for name, tensor in {**model, **self.current.tensors}.items()}
        for name in self._adopted():
            fqn, _ = optimizer_state.split_name(name)
            stored, of = self.manifest.tensors[name], self.manifest.tensors.get(f"{MODEL_PREFIX}{fqn}")
            # What had the shape of its parameter when saved must have it now.
            like_parameter = of is not None and of.shape == stored.shape
            shape = tuple(self.parameters[fqn].shape) if like_parameter else stored.shape
            wanted[name] = _Like(shape, stored.dtype)
        return wanted | self._generators()

    def _adopted(self) -> list[str]:
        """Saved entries that the optimizer can take but does not have yet."""
        return [
            name
            for name in self.manifest.tensors
            if name.startswith(optimizer_state.PREFIX)
            and name not in self.current.tensors
            and optimizer_state.split_name(name)[0] in self._optimized()
        ]

    def _optimized(self) -> set[str]:
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]} if self.optimizer else set()
        return {fqn for fqn, parameter in self.parameters.items() if id(parameter) in held}

    def _generators(self) -> dict[str, _Like]:
        if "rng" not in self.parts:
            return {}
        source = random_state.source_rank(self.ranks.rank, self.ranks.size, self.manifest.header.world_size)
        current = random_state.capture(source)
        optional = random_state.name(source, "cuda")
        return {
            name: _Like.of(tensor)
            for name, tensor in current.items()
            if name != optional or name in self.manifest.tensors
        }

    def _check_optimizer(self, differences: Differences) -> None:
        saved = self.manifest.header.optimizer
        if saved is None or self.optimizer is None:
            if saved is not None:
                differences.groups.append("the checkpoint has an optimizer, the state to load has none")
            if self.optimizer is not None:
                differences.groups.append("the checkpoint has no optimizer, the state to load has one")
            return
        differences.groups.extend(optimizer_state.group_differences(saved.get("groups"), self.current.groups))
        scalars = _mapping(saved.get("scalars"))
        optimized = self._optimized()
        differences.missing.extend(name for name in self.current.scalars if name not in scalars)
        differences.unexpected.extend(name for name in scalars if optimizer_state.split_name(name)[0] not in optimized)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("the manifest's optimizer has no mapping of scalars; it is damaged")
    return value
