"""A model of 0.2 M parameters on the source of Python's standard library; trains in minutes on two CPU cores."""

from models.llama import LlamaConfig
from recipes.data import DataConfig
from recipes.optimizer import OptimizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig
from recipes.schedule import ScheduleConfig


def recipe() -> Recipe:
    """The recipe."""
    return Recipe(
        name="llama_debug",
        model=LlamaConfig.preset("debug"),
        data=DataConfig(sequence_length=256),
        optimizer=OptimizerConfig(lr=4e-3),
        schedule=ScheduleConfig(warmup_steps=20),
        training=TrainingConfig(steps=300, global_batch=32, micro_batch=16, evaluate_every=100),
        output=OutputConfig(folder="runs/llama_debug"),
    )
