"""Rules of what blocks allow that are seen as one sequence of ops, for models that exist and for those only planned."""

from parallel.activation_checkpoint import keeps_attention
from parallel.config import ActivationCheckpointing, ParallelConfig
from parallel.traits import TRAITS


def check_ops(config: ParallelConfig, *, has_experts: bool) -> None:
    """Refuses what cannot be chosen among the ops of blocks.

    Args:
        config: The layout.
        has_experts: Whether some block has experts.

    Raises:
        ValueError: If a policy would choose among ops that torch cannot compile, or that are not one graph.
    """
    if not config.compile or config.activation_checkpointing != "selective":
        return
    policy = config.activation_checkpoint_policy
    if config.tp > 1 and not keeps_attention(policy):
        raise ValueError(
            f"activation_checkpoint_policy={policy!r} computes attention again, which torch 2.13 cannot compile under "
            f"tp={config.tp}; use activation_checkpointing='full', a policy that keeps attention, or compile=False"
        )
    if breaks_graph(config, has_experts=has_experts):
        raise ValueError(
            "activation_checkpointing='selective' with compile=True chooses among the ops of one graph, which blocks "
            "with experts leave for the exchange of rows; use activation_checkpointing='full', or compile=False"
        )


def breaks_graph(config: ParallelConfig, *, has_experts: bool) -> bool:
    """Whether blocks are compiled to more than one graph.

    Args:
        config: The layout.
        has_experts: Whether some block has experts.
    """
    return config.compile and has_experts


def sees_whole_blocks(config: ParallelConfig, checkpointing: ActivationCheckpointing) -> bool:
    """Whether each block is seen as one sequence of ops, so that no sharding unit may lie within one.

    Args:
        config: The layout.
        checkpointing: What it recomputes; a layout that is only planned may leave its own field at the default.
    """
    return TRAITS[config.data_parallel].shards and (config.compile or checkpointing == "selective")
