"""Hugging Face folders as models, recipes and checkpoints of ours."""

import os
import warnings
from pathlib import Path

import torch
from torch import nn

from checkpoint.hub.folder import read_hub_config
from checkpoint.hub.load import HubNames
from checkpoint.manifest import Header
from checkpoint.offline import Progress, write_checkpoint
from checkpoint.sources import HubSource
from models import registry
from models.config import ModelConfig
from models.registry import family_of, hub_format
from recipes.data import DataConfig, TokenizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig

CONTEXT = 2048
"""Tokens of a sample of an imported model, if it takes as many."""


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


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


def tokenizer_files(recipe: Recipe) -> dict[str, bytes]:
    """What others need of a recipe's tokenizer beside the weights, as its files have it; nothing for bytes.

    Args:
        recipe: The recipe; where its tokenizer is no longer there, a warning says so.

    Returns:
        Name -> content.

    Raises:
        OSError: If a file cannot be read.
    """
    if recipe.data.tokenizer.file is None:
        return {}
    file = Path(recipe.data.tokenizer.file)
    folder = file if file.is_dir() else file.parent
    file = folder / TOKENIZER_FILES[0] if file.is_dir() else file
    if not file.is_file():
        warnings.warn(f"the tokenizer {str(file)!r} is not there; the folder gets none", stacklevel=2)
        return {}
    found = {TOKENIZER_FILES[0]: file.read_bytes()}
    return found | {name: path.read_bytes() for name in TOKENIZER_FILES[1:] if (path := folder / name).is_file()}


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


def _on_meta(config: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        return family_of(config).build(config)
