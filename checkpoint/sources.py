"""Checkpoints and Hugging Face folders as tensors of which parts can be read."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from checkpoint import random_state
from checkpoint.boxes import Box, whole
from checkpoint.canonical import MODEL_PREFIX
from checkpoint.hub.folder import open_hub_folder
from checkpoint.hub.load import HubNames, HubPlan, read_parts
from checkpoint.hub.places import parts_of
from checkpoint.reader import ShardReader

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Canonical name -> dtype and shape."""


class CheckpointSource:
    """The tensors of a checkpoint, each byte of them verified when it is read.

    Attributes:
        tensors: Canonical name -> dtype and shape.
        header: All that is no tensor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the manifest.

        Args:
            path: The folder of one step.

        Raises:
            ValueError: If it is no complete checkpoint.
        """
        self._reader = ShardReader(path)
        manifest = self._reader.manifest
        self.header = manifest.header
        self.tensors: Tensors = {name: (each.dtype, each.shape) for name, each in manifest.tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, on the CPU."""
        return self._reader.read(name, box.offsets, box.sizes)


class OtherRanksSource:
    """The tensors of a checkpoint as another number of ranks would have saved them.

    All are the same but for generators of random numbers, of which there is a row for each rank: CPU states follow the
    rule for a changed number of ranks (`checkpoint.random_state.restore`), GPU states, which it derives from them, are
    left out.

    Attributes:
        tensors: Canonical name -> dtype and shape.
        header: All that is no tensor.
    """

    def __init__(self, source: CheckpointSource, world_size: int) -> None:
        """Reads the first row of CPU states.

        Args:
            source: The checkpoint.
            world_size: Ranks.

        Raises:
            ValueError: If it is damaged.
        """
        self._source, self.header = source, source.header
        self.tensors: Tensors = source.tensors
        self._states: Tensor | None = None
        if world_size != source.header.world_size and random_state.CPU in source.tensors:
            dtype, shape = source.tensors[random_state.CPU]
            first = source.read(random_state.CPU, whole(shape).rows(0, 0, 1))[0]
            self._states = random_state.for_other_ranks(first, world_size)
            kept = {name: each for name, each in source.tensors.items() if name != random_state.CUDA}
            self.tensors = kept | {random_state.CPU: (dtype, tuple(self._states.shape))}

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, on the CPU."""
        if self._states is None or name != random_state.CPU:
            return self._source.read(name, box)
        return self._states[box.offsets[0] : box.offsets[0] + box.sizes[0]]


class HubSource:
    """The parameters of a Hugging Face folder under our names, converted to the dtypes of a model.

    Attributes:
        tensors: Canonical name -> dtype and shape.
    """

    def __init__(self, path: str | os.PathLike[str], parameters: Mapping[str, Tensor], names: HubNames) -> None:
        """Holds the folder against the model.

        Args:
            path: The folder.
            parameters: fqn -> parameter on meta; tied ones under their first name.
            names: Where files keep them.

        Raises:
            ValueError: If it cannot be read or does not fit; lists every difference.
            OSError: If a file cannot be read.
        """
        self._plan = HubPlan(open_hub_folder(path), parameters, names, cast=True)
        self.tensors: Tensors = {
            f"{MODEL_PREFIX}{fqn}": (each.dtype, tuple(each.shape)) for fqn, each in parameters.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a parameter, on the CPU."""
        values = torch.empty(box.sizes, dtype=self.tensors[name][0])
        places = self._plan.places[name.removeprefix(MODEL_PREFIX)]
        read_parts(self._plan.folder, list(parts_of(places, box, values)))
        return values
