"""Llama 3.1 70B on 256 GPUs: 8 of a node share each matrix, 4 nodes the layers, 8 such groups the training state.

Give `--data.source` and `--data.tokenizer.file`, or put your text and the model's tokenizer.json where the recipe
looks for them.
"""

from dataclasses import replace

from recipes import llama_3_1_70b
from recipes.recipe import Recipe

WORLD_SIZE = 256
"""Ranks that the layout is meant for."""


def recipe() -> Recipe:
    """The recipe `llama_3_1_70b` in three dimensions."""
    base = llama_3_1_70b.recipe()
    return replace(
        base,
        name="llama_3_1_70b_3d",
        parallel=replace(base.parallel, pp=4, schedule="interleaved_1f1b"),
        output=replace(base.output, folder="runs/llama_3_1_70b_3d"),
    )
