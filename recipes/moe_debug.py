"""A small model with 8 experts on the source of Python's standard library; trains in minutes on two CPU cores."""

from models.moe import MoeConfig
from recipes.data import DataConfig
from recipes.optimizer import OptimizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig
from recipes.schedule import ScheduleConfig


def recipe() -> Recipe:
    """The recipe."""
    return Recipe(
        name="moe_debug",
        model=MoeConfig.preset("debug", balance_loss=0.001, balance_rate=0.001),
        data=DataConfig(sequence_length=256),
        optimizer=OptimizerConfig(lr=4e-3),
        schedule=ScheduleConfig(warmup_steps=20),
        training=TrainingConfig(steps=300, global_batch=32, micro_batch=16, evaluate_every=100),
        output=OutputConfig(folder="runs/moe_debug"),
    )
