"""Builds the model of a recipe on a mesh."""

import torch

from models.registry import family_of
from parallel import Mesh, Trained, parallelize
from recipes.recipe import Recipe


def build_model(recipe: Recipe, mesh: Mesh) -> Trained:
    """The recipe's model, laid out on a mesh, its parameters still on meta.

    Args:
        recipe: What to train and how to split it.
        mesh: The mesh of `recipe.parallel`.
    """
    family = family_of(recipe.model)
    with torch.device("meta"):
        model = family.build(recipe.model).to(getattr(torch, recipe.training.stored_dtype))
    return parallelize(model, mesh, recipe.parallel, family.plan(recipe.model))
