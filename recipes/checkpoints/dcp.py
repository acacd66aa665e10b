"""Converts checkpoints from and to the format of torch.distributed.checkpoint, on as many ranks as are wanted."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from checkpoint import TrainState, save
from checkpoint.foreign.dcp import load_dcp, save_dcp
from checkpoint.foreign.match import Keys
from checkpoint.foreign.torch_file import load_torch_file
from models.config import ModelConfig
from models.hub import TitanKey
from models.registry import family_of
from parallel import ParallelConfig, Trained, build_mesh
from parallel.materialize import allocate
from parallel.replicas import local_part
from recipes.checkpoints.report import Report, progress
from recipes.find import find_recipe
from recipes.from_checkpoint import find_checkpoint, load_model, recipe_of
from recipes.launch import run
from recipes.launchers import is_first_rank
from recipes.model import build_model
from recipes.recipe import Recipe

Names = Literal["meshwright", "torchtitan"]
"""Whose names parameters have; torchtitan's rows of queries and keys lie otherwise, too."""


@dataclass(frozen=True, kw_only=True)
class ImportDcp:
    """Makes a checkpoint of step 0 of a model in torch's own format, torchtitan's for example.

    Attributes:
        source: A folder of torch.distributed.checkpoint, or a file that torch.save wrote.
        folder: Where the checkpoint appears.
        recipe: The model: a recipe by name or .py file, or a checkpoint or Hugging Face folder of the same model.
        names: Whose names the parameters have there.
        allow_pickle: Such a folder has a pickle in it, which can run any code when it is read: say that you trust it.
            A file needs no such trust.
        nproc: Ranks that share the work and the memory; default: one for each GPU, or 2 without any.
        json: Print JSON.
        debug: Show the traceback of an error.
    """

    source: Annotated[str, tyro.conf.Positional]
    folder: Annotated[str, tyro.conf.Positional]
    recipe: str
    names: Names = "meshwright"
    allow_pickle: bool = False
    nproc: int | None = None
    json: bool = False
    debug: bool = False

    def run(self) -> Report:
        """Loads and saves the model on all ranks."""
        recipe = recipe_of(find_checkpoint(self.recipe)) if os.path.isdir(self.recipe) else find_recipe(self.recipe)
        path = run(import_on_rank, self, recipe, num_processes=self.nproc, debug=self.debug)
        return Report(values={"path": path}, shown=[f"wrote {path}"])


@dataclass(frozen=True, kw_only=True)
class ExportDcp:
    """Makes a folder of torch.distributed.checkpoint of the model in a checkpoint.

    Attributes:
        checkpoint: A checkpoint, or a folder of them or of a run, of which the newest is taken.
        folder: The new folder.
        names: Whose names the parameters get.
        nproc: Ranks that share the work and the memory; default: one for each GPU, or 2 without any.
        json: Print JSON.
        debug: Show the traceback of an error.
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    folder: Annotated[str, tyro.conf.Positional]
    names: Names = "meshwright"
    nproc: int | None = None
    json: bool = False
    debug: bool = False

    def run(self) -> Report:
        """Loads and saves the model on all ranks."""
        found = find_checkpoint(self.checkpoint)
        run(export_on_rank, self, found, recipe_of(found), num_processes=self.nproc, debug=self.debug)
        return Report(values={"path": self.folder}, shown=[f"wrote {self.folder}"])


def import_on_rank(command: ImportDcp, recipe: Recipe) -> str:
    """What every rank does of an import.

    Args:
        command: What was asked for.
        recipe: The model.

    Returns:
        The checkpoint.
    """
    if Path(command.folder, "step-00000000").exists():
        raise ValueError(f"{command.folder} holds a checkpoint of step 0 already; name another folder, or remove it")
    trained = build_model(recipe, build_mesh(ParallelConfig()))
    allocate(trained)
    keys = keys_of(recipe.model, trained, command.names)
    if os.path.isdir(command.source):
        with _progress("import", trained) as advance:
            load_dcp(command.source, trained, keys, allow_pickle=command.allow_pickle, cast=True, progress=advance)
    else:
        load_torch_file(command.source, trained, keys, cast=True)
    return str(save(command.folder, TrainState(trained=trained, recipe=recipe.to_json())))


def export_on_rank(command: ExportDcp, checkpoint: str, recipe: Recipe) -> None:
    """What every rank does of an export.

    Args:
        command: What was asked for.
        checkpoint: One checkpoint.
        recipe: The recipe that it holds.
    """
    trained = load_model(checkpoint, recipe, ParallelConfig())
    with _progress("export", trained) as advance:
        save_dcp(command.folder, trained, keys_of(recipe.model, trained, command.names), progress=advance)


def _progress(what: str, trained: Trained) -> AbstractContextManager[Callable[[int], None]]:
    """Shows how far the first rank has come with its part, which is as large as those of the others."""
    total = sum(local_part(each).nbytes for each in trained.named_parameters().values())
    return progress(what, total) if is_first_rank() else nullcontext(lambda num_bytes: None)


def keys_of(config: ModelConfig, trained: Trained, names: Names) -> Keys:
    """Where others keep the parameters of a model.

    Args:
        config: Its config.
        trained: The model.
        names: Whose names they have.

    Raises:
        ValueError: If they have no such models.
    """
    fqns = list(trained.named_parameters())
    if names == "meshwright":
        return {fqn: TitanKey(name=fqn) for fqn in fqns}
    family = family_of(config)
    if family.titan_key is None:
        raise ValueError(f"models of the family {family.name} have no names in torchtitan; use names meshwright")
    return {fqn: family.titan_key(config, fqn) for fqn in fqns}
