"""Llama 3.1 8B on sequences of 131,072 tokens on 64 GPUs: 2 share each matrix, 8 each sequence, 32 the training state.

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
    """The recipe: 32 sequences of 131,072 tokens a step, 8.4 B tokens."""
    return Recipe(
        name="llama_3_1_8b_128k",
        model=LlamaConfig.preset("llama3.1-8b"),
        parallel=ParallelConfig(
            cp=8,
            cp_method="ring",
            tp=2,
            activation_checkpointing="full",
            precision=Precision(compute="bfloat16", reduce="float32"),
        ),
        data=DataConfig(
            source="data/text", tokenizer=TokenizerConfig(file="data/tokenizer.json"), sequence_length=131_072
        ),
        optimizer=OptimizerConfig(lr=2e-5),
        schedule=ScheduleConfig(warmup_steps=100, min_ratio=0.1),
        training=TrainingConfig(steps=2000, global_batch=32, micro_batch=1, evaluate_every=1000),
        output=OutputConfig(folder="runs/llama_3_1_8b_128k", save_every=500, keep=3),
    )
