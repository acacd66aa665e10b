"""Llama 3.1 70B on 256 GPUs: 8 of a node share each matrix, 4 nodes the layers, 8 such groups the training state.

Give `--data.source` and `--data.tokenizer.file`, or put your text and the model's tokenizer.json where the recipe
looks for them.
"""

from models.llama import LlamaConfig
from parallel import ParallelConfig, Precision
from recipes.data import DataConfig, TokenizerConfig
from recipes.optimizer import OptimizerConfig
from recipes.recipe import OutputConfig, Recipe, TrainingConfig
from recipes.schedule import ScheduleConfig

WORLD_SIZE = 256
"""Ranks that the layout is meant for."""


def recipe() -> Recipe:
    """The recipe: 1024 sequences of 8192 tokens a step, 1 T tokens."""
    return Recipe(
        name="llama_3_1_70b_3d",
        model=LlamaConfig.preset("llama3.1-70b"),
        parallel=ParallelConfig(
            pp=4,
            schedule="interleaved_1f1b",
            tp=8,
            activation_checkpointing="full",
            precision=Precision(compute="bfloat16", reduce="float32"),
        ),
        data=DataConfig(
            source="data/text", tokenizer=TokenizerConfig(file="data/tokenizer.json"), sequence_length=8192
        ),
        optimizer=OptimizerConfig(lr=1.5e-4),
        schedule=ScheduleConfig(warmup_steps=2000, min_ratio=0.1),
        training=TrainingConfig(steps=120_000, global_batch=1024, micro_batch=1, evaluate_every=1000),
        output=OutputConfig(folder="runs/llama_3_1_70b_3d", save_every=500, keep=3),
    )
