"""Qwen3 30B-A3B from scratch on 64 GPUs: 8 of a node share the experts, all 64 the training state (ZeRO-3).

Give `--data.source` and `--data.tokenizer.file`, or put your text and the model's tokenizer.json where the recipe
looks for them.
"""

from models.moe import MoeConfig
from parallel import ParallelConfig, Precision
from recipes.data import DataConfig, TokenizerConfig
from recipes.optimizer import OptimizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig
from recipes.schedule import ScheduleConfig

WORLD_SIZE = 64
"""Ranks that the layout is meant for."""


def recipe() -> Recipe:
    """The recipe: 1024 sequences of 4096 tokens a step, 1 T tokens."""
    return Recipe(
        name="moe_qwen3_30b_a3b",
        model=MoeConfig.preset("qwen3-30b-a3b"),
        parallel=ParallelConfig(
            ep=8,
            activation_checkpointing="full",
            precision=Precision(compute="bfloat16", reduce="float32"),
        ),
        data=DataConfig(
            source="data/text", tokenizer=TokenizerConfig(file="data/tokenizer.json"), sequence_length=4096
        ),
        optimizer=OptimizerConfig(lr=3e-4),
        schedule=ScheduleConfig(warmup_steps=2000, min_ratio=0.1),
        training=TrainingConfig(steps=240_000, global_batch=1024, micro_batch=1, evaluate_every=1000),
        output=OutputConfig(folder="runs/moe_qwen3_30b_a3b", save_every=500, keep=3),
    )
