"""Llama 3.1 8B from scratch on 64 GPUs, or any number from 8 on, which share all of the training state (ZeRO-3).

Give `--data.source` and `--data.tokenizer.file`, or put your text and the model's tokenizer.json where the recipe
looks for them.
"""

from models.llama import LlamaConfig
from parallel import ParallelConfig, Precision
from recipes.data import DataConfig, TokenizerConfig
from recipes.optimizer import OptimizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig
from recipes.schedule import ScheduleConfig

WORLD_SIZE = 64
"""Ranks that the layout is meant for."""


def recipe() -> Recipe:
    """The recipe: 512 sequences of 8192 tokens a step, 1 T tokens."""
    return Recipe(
        name="llama_3_1_8b",
        model=LlamaConfig.preset("llama3.1-8b"),
        parallel=ParallelConfig(
            activation_checkpointing="selective",
            precision=Precision(compute="bfloat16", reduce="float32"),
        ),
        data=DataConfig(
            source="data/text", tokenizer=TokenizerConfig(file="data/tokenizer.json"), sequence_length=8192
        ),
        optimizer=OptimizerConfig(lr=3e-4),
        schedule=ScheduleConfig(warmup_steps=2000, min_ratio=0.1),
        training=TrainingConfig(steps=240_000, global_batch=512, micro_batch=1, evaluate_every=1000),
        output=OutputConfig(folder="runs/llama_3_1_8b", save_every=500, keep=3),
    )
