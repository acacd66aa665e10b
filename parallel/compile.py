"""Compiles a model's blocks one by one."""

from collections.abc import Sequence

import torch
from torch import nn

from parallel.plan import Block


def apply_compile(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Compiles the forward of each block, as one graph.

    A block's forward is replaced rather than the block wrapped: no name changes, and hooks on the block, which gather
    its parameters, stay outside of the graph. Blocks of one shape share their compiled code.

    Args:
        model: The whole model, already split by tensor parallel where that is in use.
        blocks: Its blocks.
    """
    for block in blocks:
        module = model.get_submodule(block.fqn)
        module.forward = torch.compile(module.forward, fullgraph=True)
