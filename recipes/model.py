"""Builds the model of a recipe, whole or on a mesh."""

import torch
from torch import nn

from models.layers.lora import add_adapters
from models.registry import family_of
from parallel import Mesh, ParallelPlan, Trained, parallelize
from recipes.recipe import Recipe


def build_model(recipe: Recipe, mesh: Mesh) -> Trained:
    """The recipe's model, laid out on a mesh, its parameters still on meta.

    Args:
        recipe: What to train and how to split it.
        mesh: The mesh of `recipe.parallel`.
    """
    model, plan = model_and_plan(recipe)
    return parallelize(model, mesh, recipe.parallel, plan)


def whole_model(recipe: Recipe) -> nn.Module:
    """The recipe's model on meta, not laid out.

    Args:
        recipe: What to train.
    """
    return model_and_plan(recipe)[0]


def model_and_plan(recipe: Recipe) -> tuple[nn.Module, ParallelPlan]:
    """The recipe's model on meta, with its adapters if any, and what it declares.

    Args:
        recipe: What to train.

    Raises:
        ValueError: If an adapter has nothing to be added to.
    """
    family = family_of(recipe.model)
    with torch.device("meta"):
        model = family.build(recipe.model).to(getattr(torch, recipe.training.stored_dtype))
    plan = family.plan(recipe.model)
    return model, add_adapters(model, plan, recipe.lora) if recipe.lora.rank else plan
