"""Finds a checkpoint or a Hugging Face folder, its recipe, and its weights on whatever mesh is wanted."""

import os
from dataclasses import replace

from checkpoint import TrainState, latest, load, read_manifest
from checkpoint.canonical import MODEL_PREFIX
from checkpoint.hub.folder import is_hub_folder
from checkpoint.hub.load import load_hub
from checkpoint.manifest import MANIFEST_NAME
from checkpoint.ranks import Ranks
from parallel import ParallelConfig, Trained, build_mesh
from parallel.materialize import allocate
from recipes.adapters import PartOf, adapters_of, base_of, base_path, holds
from recipes.data import check_vocabulary
from recipes.hub import hub_names, recipe_of_hub
from recipes.model import build_model
from recipes.recipe import Recipe, changed_fields
from recipes.structure import from_json


def find_checkpoint(path: str) -> str:
    """One checkpoint of a path that may be that, a folder of them, or the folder of a run or a Hugging Face model.

    Args:
        path: The path.

    Raises:
        ValueError: If there is none.
    """
    if not os.path.isdir(path):
        raise ValueError(f"there is no checkpoint: {path!r} is not a folder")
    if os.path.exists(os.path.join(path, MANIFEST_NAME)) or is_hub_folder(path):
        return path
    # Whoever loads it checks what it reads.
    found = latest(path, thorough=False) or latest(os.path.join(path, "checkpoints"), thorough=False)
    if found is None:
        raise ValueError(f"{path!r} holds no complete checkpoint (a folder step-<number> with {MANIFEST_NAME})")
    return str(found)


def recipe_of(path: str) -> Recipe:
    """The recipe that a checkpoint holds, or one for a Hugging Face model.

    Args:
        path: One checkpoint, or the folder of such a model.

    Raises:
        ValueError: If it holds none, is not complete, or holds a model that is not built.
    """
    return recipe_of_hub(path) if is_hub_folder(path) else from_json(read_manifest(path).header.recipe)


def check_layout_of(recipe: Recipe, layout: ParallelConfig, world_size: int) -> None:
    """Checks before a rank starts that a model can be used on a layout.

    Args:
        recipe: The recipe of its checkpoint, with the data that it is used on.
        layout: How to split the model, whatever layout wrote the checkpoint.
        world_size: Ranks of the job.

    Raises:
        ValueError: If the layout does not fit, or a tokenizer that the recipe names is not there or not the model's.
    """
    replace(recipe, parallel=layout).check_layout(world_size)
    check_vocabulary(recipe.data, recipe.model.shape.vocab_size)


def load_model(path: str, recipe: Recipe, layout: ParallelConfig) -> Trained:
    """The model of a checkpoint on the mesh of a layout; every rank of the job calls this.

    Args:
        path: One checkpoint.
        recipe: The recipe that it holds.
        layout: How to split the model, whatever layout wrote the checkpoint.

    Raises:
        ValueError: If the layout does not fit, or the checkpoint cannot be read.
    """
    recipe = replace(recipe, parallel=layout)
    if recipe.lora.rank and not _holds(find_checkpoint(path))[1]:
        raise ValueError(f"{path} has no adapters, but the recipe asks for lora.rank={recipe.lora.rank}; set it to 0")
    trained = build_model(recipe, build_mesh(layout))
    # All of them are loaded, or none is used.
    allocate(trained, clear=False)
    load_weights(path, trained, recipe)
    return trained


def load_weights(path: str, trained: Trained, recipe: Recipe) -> None:
    """Fills the parameters from a checkpoint, and nothing else; every rank of the job calls this.

    Of adapters those are filled that the checkpoint has; where it has nothing else, the base comes from where it says.

    Args:
        path: One checkpoint, or a folder that `find_checkpoint` takes.
        trained: What to fill; its parameters have memory.
        recipe: Its recipe.

    Raises:
        ValueError: If it is another model, or the checkpoint cannot be read.
    """
    found = find_checkpoint(path)
    refuse_other_model(found, recipe)
    has_base, has_adapters = _holds(found)
    if recipe.lora.rank and not (has_base and has_adapters):
        at = Ranks().on_coordinator("find the base of the adapters", lambda: base_path(found))
        load_base(at, trained, recipe)
        if has_adapters:
            _load_parameters(found, adapters_of(trained), recipe)
        return
    _load_parameters(found, trained, recipe)


def load_base(path: str, trained: Trained, recipe: Recipe) -> None:
    """Fills all parameters but those of adapters; every rank of the job calls this.

    Args:
        path: One checkpoint, or a Hugging Face folder; it may have adapters too.
        trained: What to fill; its parameters have memory.
        recipe: Its recipe.

    Raises:
        ValueError: If it is another model, or the checkpoint cannot be read.
    """
    _load_parameters(path, base_of(trained), recipe)


def _holds(found: str) -> tuple[bool, bool]:
    """Whether a checkpoint or folder has parameters of a base, and whether it has some of adapters."""
    return (True, False) if is_hub_folder(found) else holds(read_manifest(found))


def _load_parameters(found: str, trained: Trained | PartOf, recipe: Recipe) -> None:
    """Fills a model, or a part of it, from a checkpoint or a Hugging Face folder that must fit it."""
    if is_hub_folder(found):
        load_hub(found, trained, hub_names(recipe.model), cast=True)
        return
    keys = None
    if isinstance(trained, PartOf):
        # A base may have been saved with adapters that were trained on it.
        names = [f"{MODEL_PREFIX}{fqn}" for fqn in trained.named_parameters()]
        keys = dict(zip(names, names, strict=True))
    try:
        load(found, TrainState(trained=trained), parts=("model",), keys=keys)
    except ValueError as error:
        raise in_one_line(error, found, recipe, "; give a checkpoint of this model, or change the recipe's") from error


def refuse_other_model(path: str | os.PathLike[str], recipe: Recipe) -> None:
    """Refuses a checkpoint of a model that computes something else, even if all of its tensors would fit.

    Args:
        path: The checkpoint; one that holds no recipe is not looked at.
        recipe: The recipe to load for.

    Raises:
        ValueError: If the models differ; names the fields.
    """
    of = recipe_of_hub(path).to_json() if is_hub_folder(path) else read_manifest(path).header.recipe
    saved, now = of.get("model"), recipe.to_json()["model"]
    if saved is None:
        return
    adapters = of.get("lora", {}) if of.get("lora", {}).get("rank") and recipe.lora.rank else {}
    # What these say is of no consequence for what the model computes once there are values.
    same = {name: now[name] for name in ("init_std", "max_sequence_length", "balance_loss") if name in now}
    changes = changed_fields({**saved, **same}, now, "model.")
    if adapters:
        changes += changed_fields(adapters, recipe.to_json()["lora"], "lora.")
    if changes:
        raise ValueError(
            f"{path} does not fit: the model is another one (saved -> now): {'; '.join(changes)}; name another "
            "output.folder or checkpoint, or change the recipe's model"
        )


def in_one_line(error: ValueError, path: str | os.PathLike[str], recipe: Recipe, remedy: str = "") -> ValueError:
    """What a failed load says to a user: which fields of the model differ, rather than every tensor that does.

    Args:
        error: What `load` raised.
        path: The checkpoint.
        recipe: The recipe to load for.
        remedy: What to do about it, put last.
    """
    header = read_manifest(path).header
    now = recipe.to_json()
    changes = changed_fields(header.recipe.get("model", {}), now["model"], "model.")
    saved_dtype = header.recipe.get("training", {}).get("stored_dtype")
    if saved_dtype not in (None, recipe.training.stored_dtype):
        changes.append(f"training.stored_dtype {saved_dtype} -> {recipe.training.stored_dtype}")
    if not changes:
        return error
    return ValueError(
        f"{str(error).splitlines()[0]}: the model is another one (saved -> now): {'; '.join(changes)}{remedy}"
    )
