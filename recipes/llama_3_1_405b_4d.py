"""Llama 3.1 405B on sequences of 131,072 tokens on 8192 GPUs: 8 share each matrix, 16 each sequence, 16 the layers.

Give `--data.source` and `--data.tokenizer.file`, or put your text and the model's tokenizer.json where the recipe
looks for them.
"""

from models.llama import LlamaConfig
from parallel import ParallelConfig, Precision
from recipes.data import DataConfig, TokenizerConfig
from recipes.optimizer import OptimizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig
from recipes.schedule import ScheduleConfig

WORLD_SIZE = 8192
"""Ranks that the layout is meant for."""


def recipe() -> Recipe:
    """The recipe: 128 sequences of 131,072 tokens a step, 168 B tokens."""
    return Recipe(
        name="llama_3_1_405b_4d",
        model=LlamaConfig.preset("llama3.1-405b"),
        parallel=ParallelConfig(
            pp=16,
            schedule="interleaved_1f1b",
            cp=16,
            cp_method="ring",
            tp=8,
            activation_checkpointing="full",
            precision=Precision(compute="bfloat16", reduce="float32"),
        ),
        data=DataConfig(
            source="data/text", tokenizer=TokenizerConfig(file="data/tokenizer.json"), sequence_length=131_072
        ),
        optimizer=OptimizerConfig(lr=2e-5),
        schedule=ScheduleConfig(warmup_steps=200, min_ratio=0.1),
        training=TrainingConfig(steps=10_000, global_batch=128, micro_batch=1, evaluate_every=1000),
        output=OutputConfig(folder="runs/llama_3_1_405b_4d", save_every=500, keep=3),
    )
