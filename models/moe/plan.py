"""What a model with mixtures of experts declares about itself for `parallel`."""

from dataclasses import replace

from models.llama.plan import llama_plan
from models.moe.config import MoeConfig
from parallel.plan import Block, ParallelPlan


def moe_plan(config: MoeConfig) -> ParallelPlan:
    """The plan of a whole model: that of a dense one, whose blocks cost what a token meets.

    Args:
        config: Shape of the model.
    """
    plan = llama_plan(config)
    sparse_cost = 2.0 * config.num_matmul_parameters_per_sparse_block
    blocks = tuple(
        block if index in config.dense_layers else Block(fqn=block.fqn, cost=sparse_cost)
        for index, block in enumerate(plan.blocks)
    )
    return replace(plan, blocks=blocks)
