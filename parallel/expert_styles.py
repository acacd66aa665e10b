"""Tensor-parallel styles of a layer with experts: what its modules compute is a partial sum until the layer's end.

Each rank has a part of the hidden width of every expert, so that what flows back through the experts is a partial sum
too. The router sees whole tokens and every rank computes all of it: what reaches it from the experts is summed first,
and what it hands on, which is whole on every rank, is divided by their number before it joins partial sums.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

EXPERT_DIMS: Mapping[str, int] = {"gate_proj": 2, "up_proj": 2, "down_proj": 1}
"""Dim of each parameter of a module of experts, [E, in, out], that is the hidden width."""


class ExpertLayer(ParallelStyle):
    """Hands a layer whole sequences, and sums the first of its results over ranks.

    Args:
        residual: Placement of the activations between modules.
    """

    def __init__(self, residual: Placement) -> None:
        super().__init__()
        self.residual = residual

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            own = DTensor.from_local(inputs[0], device_mesh, [self.residual], run_check=False)
            whole = own.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            return (whole, *inputs[1:])

        def add(_: nn.Module, _inputs: object, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
            parts = DTensor.from_local(outputs[0], device_mesh, [Partial()], run_check=False)
            return (parts.redistribute(placements=[self.residual]).to_local(), *outputs[1:])

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(add)
        return module


class WholeRouter(ParallelStyle):
    """Lets every rank compute a whole router between partial sums; the first of its results weighs experts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_ShareOfGradient.apply(inputs[0], group.size()), *inputs[1:])

        def leave(_: nn.Module, _inputs: object, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_SumOfGradients.apply(outputs[0], group), *outputs[1:])

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


class SplitExperts(ParallelStyle):
    """Splits the hidden width of every expert of a module whose parameters `EXPERT_DIMS` names."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            _split(module, name, parameter, EXPERT_DIMS[name], device_mesh)
        return module


class PartialLinear(ParallelStyle):
    """Splits a linear map without a bias that takes and gives what each rank has, with no collective.

    What lies within the map, such as an adapter, takes what it takes and adds to what it gives.

    Args:
        dim: 0 splits what it gives, 1 what it takes; None: every rank holds all of it, and gradients of it are summed.
    """

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _split(module, "weight", module.get_parameter("weight"), self.dim, device_mesh)
        module.forward = functools.partial(_local_linear, module)
        return module


def _split(module: nn.Module, name: str, parameter: nn.Parameter, dim: int | None, mesh: DeviceMesh) -> None:
    placement: Placement = Replicate() if dim is None else Shard(dim)
    split = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))


def _local_linear(module: nn.Module, x: Tensor) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]  # FSDP1 shows a view that is no parameter
    if isinstance(weight, DTensor):
        whole = isinstance(weight.placements[-1], Replicate)
        weight = weight.to_local(grad_placements=[Partial()] if whole else None)
    out = F.linear(x, weight)
    for within in module.children():
        out = out + within(x)
    return out


class _ShareOfGradient(torch.autograd.Function):
    """The same value; its gradient, which is whole on each of some ranks, becomes a part of a sum over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, degree: int) -> Tensor:
        ctx.degree = degree
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.degree, None


class _SumOfGradients(torch.autograd.Function):
    """The same value; its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
