"""Writes a plan as a recipe file that `recipes.train` runs."""

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from parallel.planner.ranking import Plan
from recipes.data import DataConfig
from recipes.plan.models import ALIASES, find_config
from recipes.recipe import OutputConfig, Recipe, TrainingConfig

_HEAD = '''"""{about}"""

from {package} import {family}
from parallel import {names}
from recipes.data import DataConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig

WORLD_SIZE = {world_size}
"""Ranks that the layout is meant for."""


def recipe() -> Recipe:
    """What the planner found."""
    return {recipe}
'''
STEPS = 1000
"""Optimizer steps of the recipe that is written; what is planned does not depend on it."""


def plan_recipe(model: str, plan: Plan) -> Recipe:
    """The recipe of a plan, with text that every machine has.

    Args:
        model: A preset.
        plan: Its plan.

    Raises:
        ValueError: If the model is a shape alone, which nothing here builds.
    """
    config = find_config(model)
    if config is None:
        raise ValueError(f"{model!r} is only a shape, which can be planned for but not trained; name a preset")
    name = model.replace("-", "_").replace(".", "_")
    return Recipe(
        name=name,
        model=config,
        parallel=plan.candidate.layout(),
        data=DataConfig(sequence_length=plan.request.sequence_length),
        training=TrainingConfig(
            steps=STEPS, global_batch=plan.request.global_batch, micro_batch=plan.candidate.micro_batch
        ),
        output=OutputConfig(folder=f"runs/{name}"),
    )


def write_recipe(path: str, model: str, plan: Plan) -> None:
    """Writes the recipe of a plan.

    Args:
        path: File to write, which ends in .py.
        model: A preset.
        plan: Its plan.

    Raises:
        ValueError: If the path does not end in .py.
        OSError: If the file cannot be written, or there is one.
    """
    if not path.endswith(".py"):
        raise ValueError(f"write={path!r} must end in .py: recipes.train runs such files")
    request = plan.request
    about = f"{model} on {request.num_gpus} {request.gpu.name}, as planned; set `data` to your text."
    recipe = plan_recipe(model, plan)
    call = _call(recipe, 4, ALIASES.get(model, model))
    family = type(recipe.model)
    # Configs are offered by the package of their family.
    package = family.__module__.rpartition(".")[0]
    names = ", ".join(name for name in ("Buckets", "ParallelConfig", "Precision", "Sharding") if f"{name}(" in call)
    text = _HEAD.format(
        about=about,
        package=package,
        family=family.__name__,
        names=names,
        world_size=request.num_gpus,
        recipe=call,
    )
    with Path(path).open("x", encoding="utf-8") as file:
        file.write(text)


def _call(config: Any, indent: int, preset: str) -> str:
    """The expression that makes a config, with the fields that differ from their defaults."""
    if isinstance(config, ModelConfig):
        return f"{type(config).__name__}.preset({json.dumps(preset)})"
    if isinstance(config, str):
        return json.dumps(config)
    if not is_dataclass(config):
        return repr(config)
    lines = [
        f"{' ' * (indent + 4)}{each.name}={_call(getattr(config, each.name), indent + 4, preset)},\n"
        for each in fields(config)
        if getattr(config, each.name) != _default(each)
    ]
    return f"{type(config).__name__}(\n{''.join(lines)}{' ' * indent})" if lines else f"{type(config).__name__}()"


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
