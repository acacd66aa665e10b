"""Gives each rank of the `ep` view some of the experts, and brings tokens to the ranks that hold theirs."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Private: no public collective with a gradient takes parts of different sizes.
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all
from torch.distributed.tensor import DTensor, Shard

from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.plan import ParallelPlan, matching
from parallel.reorder import Reorder, inverse_of
from parallel.replicas import local_part

# T tokens, K experts of a token, R rows to compute, E experts, N ranks that share them, L experts of one rank, D model


class GroupedRows(Protocol):
    """What computes rows that are grouped by expert."""

    num_experts: int

    def __call__(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """What each expert makes of its rows, [R, D]; `counts_E` says how many each has, the first expert first."""
        ...


class Dispatch(Protocol):
    """What a plan's `dispatches` are: they group rows by expert, let `experts` compute them, and sum by token."""

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: GroupedRows) -> Tensor:
        """The weighted sum over each token's experts, [T, D]."""
        ...


class ExpertParallelDispatch(nn.Module):
    """The dispatch of the model, whose rows are computed by the ranks that hold their experts.

    Args:
        inner: The dispatch of the model.
        group: The ranks that share the experts: the first holds the first of them, and so on.
    """

    def __init__(self, inner: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: GroupedRows) -> Tensor:
        """The weighted sum over each token's experts, [T, D].

        Args:
            x_TD: This rank's tokens, [T, D].
            weights_TK: Weight of each of a token's experts, [T, K].
            experts_TK: Their numbers, int64 [T, K].
            experts: Those of this rank.
        """
        out_TD: Tensor = self.inner(x_TD, weights_TK, experts_TK, _OnTheirRanks(experts, self.group))
        return out_TD


@dataclass(frozen=True)
class _OnTheirRanks:
    """Computes rows of all experts by an exchange of rows before and after."""

    own: GroupedRows
    group: dist.ProcessGroup

    @property
    def num_experts(self) -> int:
        """Experts on all ranks."""
        return self.own.num_experts

    def __call__(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """What each expert makes of its rows, [R, D].

        Args:
            x_RD: This rank's rows, grouped by expert, [R, D].
            counts_E: How many each expert has, int64 [E].
        """
        sent_NL = counts_E.view(self.group.size(), -1)
        arrived_NL = torch.empty_like(sent_NL)
        dist.all_to_all_single(arrived_NL, sent_NL, group=self.group)
        sent, arrived = torch.stack([sent_NL.sum(1), arrived_NL.sum(1)]).tolist()
        rows_RD = all_to_all(x_RD, arrived, sent, self.group)
        # They come rank by rank, each rank's by expert; a stable sort keeps the order of ranks within an expert.
        experts = torch.arange(arrived_NL.shape[1], device=arrived_NL.device).repeat(len(arrived_NL))
        order_R = experts.repeat_interleave(arrived_NL.flatten(), output_size=sum(arrived)).argsort(stable=True)
        inverse_R = inverse_of(order_R)
        out_RD = self.own(Reorder.apply(rows_RD, order_R, inverse_R), arrived_NL.sum(0))
        back_RD: Tensor = all_to_all(Reorder.apply(out_RD, inverse_R, order_R), sent, arrived, self.group)
        return back_RD


def check_expert_parallel(config: ParallelConfig, plan: ParallelPlan) -> None:
    """Refuses a model that does not say where its experts are, before anything is changed.

    Args:
        config: The layout with every degree resolved.
        plan: What the model declares.

    Raises:
        ValueError: If the plan names no experts, or nothing that brings tokens to them.
    """
    if config.ep > 1 and not (plan.experts and plan.dispatches):
        raise ValueError(
            f"ep={config.ep} splits the modules that hold experts and replaces those that bring tokens to them, but "
            "the plan names no experts or no dispatches; name them, or use ep=1"
        )


def apply_expert_parallel(model: nn.Module, mesh: Mesh, plan: ParallelPlan) -> None:
    """Keeps this rank's experts alone, and makes tokens travel to theirs.

    Args:
        model: The whole model, already split by tensor parallelism where that is in use.
        mesh: The mesh, with ep > 1.
        plan: Names the modules.
    """
    modules = dict(model.named_modules())
    for fqn in (fqn for pattern in plan.experts for fqn in matching(pattern, modules)):
        for name, parameter in list(modules[fqn].named_parameters(recurse=False)):
            modules[fqn].register_parameter(name, _own_experts(parameter, mesh))
    for fqn in (fqn for pattern in plan.dispatches for fqn in matching(pattern, modules)):
        model.set_submodule(fqn, ExpertParallelDispatch(modules[fqn], mesh.group("ep")))


def _own_experts(parameter: nn.Parameter, mesh: Mesh) -> nn.Parameter:
    """This rank's experts out of all, each split over `tp` as before."""
    if mesh.experts is None:
        raise ValueError("the mesh was built with ep=1; call build_mesh with this config")
    dims: tuple[str, ...] = ("ep",)
    placements = [Shard(0)]
    if isinstance(parameter, DTensor):
        dims += parameter.device_mesh.mesh_dim_names or ()
        placements += parameter.placements  # type: ignore[arg-type]  # of any kind
    # A copy, so that the others are freed.
    own = local_part(parameter).chunk(mesh.degree("ep"))[mesh.coordinate("ep")].clone()
    split = DTensor.from_local(own, mesh.experts[dims], placements, run_check=False)
    return nn.Parameter(split, requires_grad=parameter.requires_grad)
