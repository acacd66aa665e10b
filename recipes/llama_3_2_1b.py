"""Llama 3.2 1B from scratch on 8 GPUs of a node, which share gradients and optimizer state (ZeRO-2).

Give `--data.source` and `--data.tokenizer.file`, or put your text and the model's tokenizer.json where the recipe
looks for them.
"""

from models.llama import LlamaConfig
from parallel import ParallelConfig, Precision
from recipes.data import DataConfig, TokenizerConfig
from recipes.optimizer import OptimizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig
from recipes.schedule import ScheduleConfig

WORLD_SIZE = 8
"""Ranks that the layout is meant for."""


def recipe() -> Recipe:
    """The recipe: 128 sequences of 8192 tokens a step, 100 G tokens."""
    return Recipe(
        name="llama_3_2_1b",
        model=LlamaConfig.preset("llama3.2-1b"),
        parallel=ParallelConfig(
            strategy="shard_grad_op",
            activation_checkpointing="selective",
            precision=Precision(compute="bfloat16", reduce="float32"),
        ),
        data=DataConfig(
            source="data/text", tokenizer=TokenizerConfig(file="data/tokenizer.json"), sequence_length=8192
        ),
        optimizer=OptimizerConfig(lr=5e-4),
        schedule=ScheduleConfig(warmup_steps=2000, min_ratio=0.1),
        training=TrainingConfig(steps=100_000, global_batch=128, micro_batch=2, evaluate_every=1000),
        output=OutputConfig(folder="runs/llama_3_2_1b", save_every=500, keep=3),
    )
