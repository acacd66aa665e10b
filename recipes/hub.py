"""Hugging Face folders as models and recipes of ours, and checkpoints as Hugging Face folders."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoint.hub.folder import read_hub_config
from checkpoint.hub.load import HubNames
from checkpoint.hub.save import DEFAULT_FILE_BYTES, convert_to_hub
from checkpoint.manifest import Header
from checkpoint.offline import Progress, write_checkpoint
from checkpoint.sources import CheckpointSource, HubSource
from models import registry
from models.config import ModelConfig
from models.registry import family_of, hub_format
from recipes.data import DataConfig, TokenizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig
from recipes.structure import from_json

CONTEXT = 2048
"""Tokens of a sample of an imported model, if it takes as many."""


def hub_names(config: ModelConfig) -> HubNames:
    """Where Hugging Face files keep the parameters of a model.

    Args:
        config: Its config.

    Raises:
        ValueError: If they do not hold such models.
    """
    hub = hub_format(config)
    fqns = [fqn for fqn, _ in _on_meta(config).named_parameters(remove_duplicate=False)]
    return HubNames(
        places=lambda names: {fqn: hub.parts(config, fqn, names) for fqn in fqns},
        ignored=hub.ignored,
        tied=family_of(config).plan(config).tied,
    )


def recipe_of_hub(path: str | os.PathLike[str]) -> Recipe:
    """A recipe for the model of a folder, with its tokenizer where the folder has one.

    Args:
        path: The folder.

    Raises:
        ValueError: If its config.json asks for anything that is not built.
        OSError: If it cannot be read.
    """
    path = Path(path)
    model = registry.from_hub_config(read_hub_config(path))
    tokenizer = path.absolute() / "tokenizer.json"
    return Recipe(
        name=path.absolute().name,
        model=model,
        data=DataConfig(
            tokenizer=TokenizerConfig(file=str(tokenizer)) if tokenizer.is_file() else TokenizerConfig(),
            sequence_length=min(CONTEXT, model.shape.max_sequence_length or CONTEXT),
        ),
        training=TrainingConfig(steps=1000),
        output=OutputConfig(folder=f"runs/{path.absolute().name}"),
    )


def hub_source(path: str | os.PathLike[str]) -> tuple[HubSource, Recipe]:
    """The parameters of a Hugging Face folder under our names in float32, and a recipe for its model.

    Args:
        path: The folder.

    Raises:
        ValueError: If it cannot be read, or asks for anything that is not built.
        OSError: If it cannot be read.
    """
    recipe = recipe_of_hub(path)
    parameters = dict(_on_meta(recipe.model).named_parameters())
    return HubSource(path, parameters, hub_names(recipe.model)), recipe


def import_hub(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    num_files: int | None = None,
    progress: Progress = lambda num_bytes: None,
) -> Path:
    """Makes a checkpoint of step 0 of a Hugging Face folder, of which some MiB are in memory at a time.

    Args:
        path: The folder.
        folder: Where checkpoints are kept.
        num_files: Over how many files tensors are divided; None: one for each GiB.
        progress: Is told of bytes that are written.

    Returns:
        The checkpoint; its values are float32, as recipes store them.

    Raises:
        ValueError: If the folder cannot be read, or asks for anything that is not built.
        OSError: If a file cannot be read or written.
    """
    source, recipe = hub_source(path)
    header = Header(step=0, num_tokens=0, world_size=1, recipe=recipe.to_json())
    return write_checkpoint(folder, source, header, num_files=num_files, progress=progress)


def export_hub(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    progress: Progress = lambda num_bytes: None,
) -> Path:
    """Makes a Hugging Face folder of a checkpoint, of which a few MiB are in memory at a time.

    Args:
        checkpoint: One checkpoint, which holds its recipe.
        path: The new folder.
        dtype: Type of the values; None: as the checkpoint has them.
        max_file_bytes: Most bytes of values in one file, unless one tensor alone has more.
        progress: Is told of bytes that were read.

    Raises:
        ValueError: If the checkpoint is damaged or holds no recipe, no class of `transformers` computes its model, or
            there is something at that path.
        OSError: If a file cannot be read or written.
    """
    source = CheckpointSource(checkpoint)
    model = from_json(source.header.recipe).model
    config: dict[str, Any] = hub_format(model).to_config(model)
    names = hub_names(model)
    return convert_to_hub(
        path, source, config, names.places(None), dtype=dtype, max_file_bytes=max_file_bytes, progress=progress
    )


def _on_meta(config: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        return family_of(config).build(config)
