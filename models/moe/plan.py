"""What a model with mixtures of experts declares about itself for `parallel`."""

from dataclasses import replace

from models.llama.plan import llama_plan
from models.moe.config import MoeConfig
from parallel.plan import Block, ParallelPlan


def moe_plan(config: MoeConfig) -> ParallelPlan:
    """The plan of a whole model: that of a dense one, whose blocks cost what a token meets.

    Ranks that split tensors hold routers and experts whole and compute the same, which sequence parallelism, where they
    see different tokens, cannot do.

    Args:
        config: Shape of the model.
    """
    plan = llama_plan(config)
    sparse_cost = 2.0 * config.num_matmul_parameters_per_sparse_block
    blocks = tuple(
        block
        if index in config.dense_layers
        else Block(fqn=block.fqn, cost=sparse_cost, has_experts=True, adds_loss=config.balance_loss > 0)
        for index, block in enumerate(plan.blocks)
    )
    styles = {key: style for key, style in plan.tensor_parallel.items() if ".feed_forward" not in key}
    styles["blocks.*.feed_forward_norm"] = "norm"
    for index in config.dense_layers:
        feed_forward = f"blocks.{index}.feed_forward"
        styles |= {feed_forward: "gather_input", f"{feed_forward}.down_proj": "rowwise"}
        styles |= {f"{feed_forward}.{name}_proj": "colwise" for name in ("gate", "up")}
    row_sums = ("blocks.*.feed_forward.whole_rows",)
    return replace(plan, blocks=blocks, tensor_parallel=styles, row_sums=row_sums)
