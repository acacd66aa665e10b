"""What a LLaMA-style model declares about itself for `parallel`."""

from models.llama.config import LlamaConfig
from parallel.plan import Block, ParallelPlan, TensorParallelStyle, Unit


def llama_plan(config: LlamaConfig) -> ParallelPlan:
    """The plan of a whole model.

    Args:
        config: Shape of the model.
    """
    styles: dict[str, TensorParallelStyle] = {
        "embed": "embedding",
        "blocks.*.attention_norm": "norm",
        "blocks.*.attention": "gather_input",
        "blocks.*.attention.q_proj": "colwise",
        "blocks.*.attention.k_proj": "colwise",
        "blocks.*.attention.v_proj": "colwise",
        "blocks.*.attention.o_proj": "rowwise",
        "blocks.*.feed_forward_norm": "norm",
        "blocks.*.feed_forward": "gather_input",
        "blocks.*.feed_forward.gate_proj": "colwise",
        "blocks.*.feed_forward.up_proj": "colwise",
        "blocks.*.feed_forward.down_proj": "rowwise",
        "norm": "norm",
        "head": "head",
    }
    if config.qk_norm:
        styles |= {"blocks.*.attention.q_norm": "head_norm", "blocks.*.attention.k_norm": "head_norm"}
    fqns = [f"blocks.{index}" for index in range(config.num_layers)]
    units = tuple(Unit(modules=(fqn,)) for fqn in fqns)
    if not config.tied_embeddings:
        # A tied weight cannot be in two units, so embedding and head then stay in the root. The head computes its
        # gradients in forward, but the norm before it needs its weight in backward and is left to the root.
        embed, head = (Unit(modules=(name,), backward_needs_weights=False) for name in ("embed", "head"))
        units = (embed, *units, head)
    cost = 2.0 * config.num_matmul_parameters_per_block
    head_cost = 2.0 * config.width * config.vocab_size
    return ParallelPlan(
        shape=config.shape,
        tensor_parallel=styles,
        units=units,
        blocks=tuple(Block(fqn=fqn, cost=cost) for fqn in fqns),
        # A look-up multiplies nothing, but each element is read, and added to in backward.
        first=(Block(fqn="embed", cost=2.0 * config.width),),
        last=(Block(fqn="norm", cost=4.0 * config.width), Block(fqn="head", cost=head_cost)),
        tied=(("embed.weight", "head.weight"),) if config.tied_embeddings else (),
        attention_cores=("blocks.*.attention.core",),
    )
