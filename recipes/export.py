"""Makes Hugging Face folders of checkpoints, adapters merged into what they adapt."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.boxes import Box
from checkpoint.canonical import MODEL_PREFIX
from checkpoint.hub.folder import is_hub_folder
from checkpoint.hub.save import DEFAULT_FILE_BYTES, convert_to_hub
from checkpoint.offline import Progress, Source
from checkpoint.sources import CheckpointSource
from models.layers.lora import ADAPTER, LoraConfig, is_of_adapter
from models.registry import hub_format
from recipes.adapters import base_path
from recipes.hub import hub_names, hub_source, tokenizer_files
from recipes.structure import from_json


class MergedSource:
    """The parameters of a base, each with what its adapter adds.

    Attributes:
        tensors: Canonical name -> dtype and shape, as the base has them.
    """

    def __init__(self, base: Source, adapters: Source, config: LoraConfig) -> None:
        """Reads nothing yet.

        Args:
            base: The base; it may hold adapters too.
            adapters: Where its adapters are.
            config: Their size.
        """
        self._base, self._adapters, self._scale = base, adapters, config.scale
        self.tensors = {
            name: each
            for name, each in base.tensors.items()
            if name.startswith(MODEL_PREFIX) and not is_of_adapter(name)
        }

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a parameter, on the CPU; sums are rounded to the dtype of the base once."""
        values = self._base.read(name, box)
        a, b = (f"{name.removesuffix('.weight')}.{ADAPTER}.{matrix}.weight" for matrix in "ab")
        if a not in self._adapters.tensors:
            return values
        (rows, columns), (num_rows, num_columns) = box.offsets, box.sizes
        rank = self._adapters.tensors[a][1][0]
        b_OR = self._adapters.read(b, Box(offsets=(rows, 0), sizes=(num_rows, rank)))
        a_RI = self._adapters.read(a, Box(offsets=(0, columns), sizes=(rank, num_columns)))
        wide = torch.promote_types(torch.promote_types(values.dtype, b_OR.dtype), torch.float32)
        delta_OI = b_OR.to(wide) @ a_RI.to(wide)
        return values.to(wide).add_(delta_OI, alpha=self._scale).to(values.dtype)


def model_source(path: str | os.PathLike[str]) -> Source:
    """The parameters of a checkpoint, adapters merged into what they adapt.

    Args:
        path: One checkpoint, which holds its recipe.

    Raises:
        ValueError: If it cannot be read, or holds adapters alone and their base is not where it says.
        OSError: If a file cannot be read.
    """
    source, path = CheckpointSource(path), str(path)
    recipe = from_json(source.header.recipe)
    if not recipe.lora.rank:
        return source
    at = base_path(path)
    if at == path:
        return MergedSource(source, source, recipe.lora)
    base = hub_source(at)[0] if is_hub_folder(at) else CheckpointSource(at)
    return MergedSource(base, source, recipe.lora)


def export_hub(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    progress: Progress = lambda num_bytes: None,
) -> Path:
    """Makes a Hugging Face folder of a checkpoint, of which a few MiB are in memory at a time; adapters are merged.

    The recipe's tokenizer comes with it, where that is one of files.

    Args:
        checkpoint: One checkpoint, which holds its recipe.
        path: The new folder.
        dtype: Type of the values; None: as the checkpoint has them.
        max_file_bytes: Most bytes of values in one file, unless one tensor alone has more.
        progress: Is told of bytes that were read.

    Raises:
        ValueError: If the checkpoint is damaged or holds no recipe, no class of `transformers` computes its model,
            there is something at that path, or the base of adapters is not where the checkpoint says.
        OSError: If a file cannot be read or written.
    """
    source = model_source(checkpoint)
    recipe = from_json(CheckpointSource(checkpoint).header.recipe)
    model = recipe.model
    config: dict[str, Any] = hub_format(model).to_config(model)
    names = hub_names(model)
    return convert_to_hub(
        path,
        source,
        config,
        names.places(None),
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        beside=tokenizer_files(recipe),
        progress=progress,
    )
