"""What a model with mixtures of experts declares about itself for `parallel`."""

from dataclasses import replace

from models.llama.plan import llama_plan
from models.moe.config import MoeConfig
from parallel.plan import Block, ParallelPlan, TensorParallelStyle


def moe_plan(config: MoeConfig) -> ParallelPlan:
    """The plan of a whole model: that of a dense one, whose blocks cost what a token meets.

    Ranks that split tensors have a part of the width of each expert and the whole router, which sees whole sequences.

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
    for index in range(config.num_layers):
        styles |= _feed_forward_styles(config, index)
    within = "blocks.*.feed_forward"
    return replace(
        plan,
        blocks=blocks,
        tensor_parallel=styles,
        experts=(f"{within}.experts",),
        dispatches=(f"{within}.dispatch",),
        row_sums=(f"{within}.whole_rows",),
        of_whole_rows=(f"{within}.capacity",) if config.capacity_factor else (),
    )


def _feed_forward_styles(config: MoeConfig, index: int) -> dict[str, TensorParallelStyle]:
    """Styles of one block's feed-forward layer."""
    layer = f"blocks.{index}.feed_forward"
    if index in config.dense_layers:
        styles: dict[str, TensorParallelStyle] = {layer: "gather_input", f"{layer}.down_proj": "rowwise"}
        return styles | {f"{layer}.{name}_proj": "colwise" for name in ("gate", "up")}
    styles = {layer: "expert_layer", f"{layer}.router": "router", f"{layer}.experts": "experts"}
    if config.shared_expert_width:
        shared = f"{layer}.shared_expert"
        styles |= {f"{shared}.{name}_proj": "partial_colwise" for name in ("gate", "up")}
        styles[f"{shared}.down_proj"] = "partial_rowwise"
    return styles
