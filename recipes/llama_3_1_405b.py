"""Llama 3.1 405B from scratch on 2048 GPUs: 8 of a node share each matrix, 128 nodes one copy, and there are two.

Give `--data.source` and `--data.tokenizer.file`, or put your text and the model's tokenizer.json where the recipe
looks for them.
"""

from models.llama import LlamaConfig
from parallel import ParallelConfig, Precision
from recipes.data import DataConfig, TokenizerConfig
from recipes.optimizer import OptimizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig
from recipes.schedule import ScheduleConfig

WORLD_SIZE = 2048
"""Ranks that the layout is meant for."""


def recipe() -> Recipe:
    """The recipe: 2048 sequences of 8192 tokens a step, 1 T tokens."""
    return Recipe(
        name="llama_3_1_405b",
        model=LlamaConfig.preset("llama3.1-405b"),
        parallel=ParallelConfig(
            tp=8,
            dp_replicate=2,
            strategy="hybrid_shard",
            activation_checkpointing="full",
            precision=Precision(compute="bfloat16", reduce="float32"),
        ),
        data=DataConfig(
            source="data/text", tokenizer=TokenizerConfig(file="data/tokenizer.json"), sequence_length=8192
        ),
        optimizer=OptimizerConfig(lr=8e-5),
        schedule=ScheduleConfig(warmup_steps=8000, min_ratio=0.01),
        training=TrainingConfig(steps=60_000, global_batch=2048, micro_batch=1, evaluate_every=1000),
        output=OutputConfig(folder="runs/llama_3_1_405b", save_every=500, keep=3),
    )
