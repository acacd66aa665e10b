"""Builds the model of a recipe, whole or on a mesh."""

import torch
from torch import nn

from models.registry import family_of
from parallel import Mesh, Trained, parallelize
from recipes.recipe import Recipe


def build_model(recipe: Recipe, mesh: Mesh) -> Trained:
    """The recipe's model, laid out on a mesh, its parameters still on meta.

    Args:
        recipe: What to train and how to split it.
        mesh: The mesh of `recipe.parallel`.
    """
    return parallelize(whole_model(recipe), mesh, recipe.parallel, family_of(recipe.model).plan(recipe.model))


def whole_model(recipe: Recipe) -> nn.Module:
    """The recipe's model on meta, not laid out.

    Args:
        recipe: What to train.
    """
    with torch.device("meta"):
        return family_of(recipe.model).build(recipe.model).to(getattr(torch, recipe.training.stored_dtype))
