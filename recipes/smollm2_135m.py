"""SmolLM2 135M from scratch on 8 GPUs: small enough to be whole on each of them.

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
    """The recipe: 512 sequences of 2048 tokens a step, 100 G tokens."""
    return Recipe(
        name="smollm2_135m",
        model=LlamaConfig.preset("smollm2-135m"),
        parallel=ParallelConfig(
            strategy="no_shard",
            precision=Precision(compute="bfloat16", reduce="float32"),
            reduce_gradients="last",
        ),
        data=DataConfig(
            source="data/text", tokenizer=TokenizerConfig(file="data/tokenizer.json"), sequence_length=2048
        ),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.01),
        schedule=ScheduleConfig(shape="wsd", warmup_steps=2000, decay_fraction=0.2, min_ratio=0.0),
        training=TrainingConfig(steps=100_000, global_batch=512, micro_batch=16, evaluate_every=1000),
        output=OutputConfig(folder="runs/smollm2_135m", save_every=1000, keep=3),
    )
