"""Multiplies the linear maps of blocks in float8, each tensor scaled by its largest element."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from parallel.config import ParallelConfig
from parallel.plan import Block

# ... any dims, T tokens, I inputs, O outputs

CAPABILITY = (8, 9)
"""First generation of GPUs whose matmuls take float8."""

MULTIPLE = 16
"""What the kernels want every dim to be a multiple of."""

REMEDY = "use precision=Precision(compute='bfloat16') without float8"


def check_float8(model: nn.Module, blocks: Sequence[Block], config: ParallelConfig, device: torch.device) -> None:
    """Refuses float8 where nothing could compute it, before anything is changed.

    Args:
        model: The whole model.
        blocks: Its blocks.
        config: The layout.
        device: Where the model will run.

    Raises:
        ValueError: If the device has no float8, the layout does not allow it, or a linear map does not take it.
    """
    if not config.precision.float8:
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        has = "a CPU" if device.type != "cuda" else f"a GPU of {'.'.join(map(str, _capability(device)))}"
        raise ValueError(
            f"float8=True needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more, this is {has}; "
            f"{REMEDY}"
        )
    check_whole_matrices(config)
    _check_maps(model, blocks)


def check_whole_matrices(config: ParallelConfig) -> None:
    """Refuses float8 where a rank has parts of matrices.

    Args:
        config: The layout.

    Raises:
        ValueError: If it has both.
    """
    if config.precision.float8 and config.tp > 1:
        raise ValueError(
            f"float8=True scales each matrix by its largest element, of which a rank of tp={config.tp} sees a part; "
            f"use tp=1, or {REMEDY}"
        )


def apply_float8(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Replaces the forward of every linear map of the blocks; no parameter and no name changes.

    Args:
        model: The model.
        blocks: Its blocks.
    """
    for linear in _linear_maps(model, blocks).values():
        linear.forward = _forward_of(linear)  # type: ignore[method-assign, assignment]


def float8_matmul(x: Tensor, weight_OI: Tensor) -> Tensor:
    """The product of x and the transposed weight, [..., O]; it and both gradients are computed in float8.

    Args:
        x: Any dims before the last, [..., I].
        weight_OI: [O, I].

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", for e4m3 in forward and e5m2 for gradients.
    """
    x_TI = x.flatten(0, -2)
    # Rows of zeros change no product and no largest element.
    padded_TI = F.pad(x_TI, (0, 0, 0, -len(x_TI) % MULTIPLE))
    out_TO: Tensor = _Float8Matmul.apply(padded_TI, weight_OI)
    return out_TO[: len(x_TI)].unflatten(0, x.shape[:-1])


class _Float8Matmul(torch.autograd.Function):
    """Scales anew in backward what it keeps in the dtype that it came in, as memory of both would be more."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return _product(x_TI, weight_OI.t(), torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        grad_x_TI = _product(grad_TO, weight_OI, torch.float8_e5m2) if wants_x else None
        grad_weight_OI = _product(grad_TO.t(), x_TI, torch.float8_e5m2) if wants_weight else None
        return grad_x_TI, grad_weight_OI


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices, the left one in a float8 dtype and the right one in e4m3, in the dtype of the left.

    Kernels want rows of the left and columns of the right one in one piece.
    """
    a, scale_a = _scaled(left, dtype)
    b, scale_b = _scaled(right, torch.float8_e4m3fn)
    return F.scaled_mm(
        a.contiguous(),
        b.t().contiguous().t(),
        scale_a,
        ScalingType.TensorWise,
        scale_b,
        ScalingType.TensorWise,
        output_dtype=left.dtype,
    )


def _scaled(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values over a scale by which they fill the range of a dtype, and that scale."""
    largest = torch.finfo(dtype).max
    scale = values.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny * largest) / largest
    # A cast to float8 makes NaN of what lies outside of the range.
    return (values.float() / scale).clamp(-largest, largest).to(dtype), scale


def _forward_of(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        out = float8_matmul(x, linear.weight)
        return out if linear.bias is None else out + linear.bias

    return forward


def _linear_maps(model: nn.Module, blocks: Sequence[Block]) -> dict[str, nn.Linear]:
    return {
        f"{block.fqn}.{name}": module
        for block in blocks
        for name, module in model.get_submodule(block.fqn).named_modules()
        if isinstance(module, nn.Linear)
    }


def _check_maps(model: nn.Module, blocks: Sequence[Block]) -> None:
    maps = _linear_maps(model, blocks)
    others = [fqn for fqn, each in maps.items() if type(each) is not nn.Linear]
    if others or not maps:
        what = f"{others[0]} is a {type(maps[others[0]]).__name__}" if others else "the blocks have none"
        raise ValueError(f"float8=True is for plain linear maps within blocks, but {what}; {REMEDY}")
    odd = [
        f"{fqn} {tuple(each.weight.shape)}"
        for fqn, each in maps.items()
        if any(n % MULTIPLE for n in each.weight.shape)
    ]
    if odd:
        raise ValueError(f"float8=True takes matrices of multiples of {MULTIPLE}, which {odd[0]} is not; {REMEDY}")


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
