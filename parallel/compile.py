"""Compiles a model's blocks one by one."""

import os
import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallel.plan import Block, matching

BACKEND = "inductor"


def check_compiler(device_type: str) -> None:
    """Refuses to compile where nothing turns generated code into machine code, which would fail in the first step.

    Args:
        device_type: Where the model will run.

    Raises:
        ValueError: If there is no compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if device_type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"compile needs a C++ compiler on the CPU and {compiler!r} was not found; install g++, set CXX, or use "
            "compile=False"
        )
    if device_type == "cuda":
        # Private: inductor asks the same, later and less clearly. No other module of torch loads this one by itself.
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ValueError("compile needs triton on a GPU and it was not found; install it, or use compile=False")


def apply_compile(model: nn.Module, blocks: Sequence[Block], options: dict[str, Any] | None = None) -> None:
    """Compiles the forward of each block as one graph, or as two around the exchange with its experts.

    A block's forward is replaced rather than the block wrapped: no name changes, and hooks on the block, which gather
    its parameters, stay outside of the graph. Blocks that are alike share their code.

    Args:
        model: The whole model, already split by tensor parallelism where that is in use.
        blocks: Its blocks.
        options: What the compiler is told; None: nothing.
    """
    for block in blocks:
        module = model.get_submodule(block.fqn)
        whole = not block.has_experts
        module.forward = torch.compile(module.forward, backend=BACKEND, fullgraph=whole, options=options)


def leave_uncompiled(model: nn.Module, patterns: Sequence[str]) -> None:
    """Keeps modules out of the graphs around them, with all that they call.

    What brings tokens to experts needs numbers of rows on the host, which are others in every step, and of the kernel
    that multiplies their groups torch 2.13 compiles bfloat16 alone.

    Args:
        model: The whole model.
        patterns: Names of the modules.
    """
    modules = dict(model.named_modules())
    for fqn in (fqn for pattern in patterns for fqn in matching(pattern, modules)):
        modules[fqn].forward = torch.compiler.disable(modules[fqn].forward)
