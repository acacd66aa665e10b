"""Keeps the whole model on every rank through `DistributedDataParallel` and sums gradients while backward runs."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from parallel.backend import Backend
from parallel.compute_dtype import in_compute_dtype
from parallel.config import ParallelConfig, ReduceGradients
from parallel.fsdp2 import apply_fsdp2
from parallel.local_step import OwnShards, step_on_local_shards
from parallel.mesh import Mesh
from parallel.plan import ParallelPlan


class Ddp(Backend):
    """The `ddp` backend.

    With tensor parallelism its parameters are DTensors, which torch's DDP does not take; `fully_shard`'s replicating
    twin then does the same, one all-reduce a unit.
    """

    wraps_before_materialize = False
    # DDP holds whole gradients anyway, so nothing is saved by sending them more than once.
    default_reduce_gradients: ReduceGradients = "last"

    def wrap(self, model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> nn.Module:
        """Wraps the model; rank 0's parameters are sent to all ranks first."""
        if mesh.degree("tp") > 1:
            apply_fsdp2(
                model,
                mesh["dp_replicate"],
                replicate=True,
                units=plan.units,
                reshard_after_forward=False,
                sharding=config.sharding,
                precision=config.precision,
            )
            return model
        options = config.buckets
        wrapped = DistributedDataParallel(
            in_compute_dtype(model, config.precision.compute_dtype),
            process_group=mesh.group("dp"),
            broadcast_buffers=False,
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=True,
        )
        wrapped.register_comm_hook((mesh.group("dp"), config.precision.reduce_dtype), _sum)
        return wrapped

    def run_micro_batch(self, model: nn.Module, compute: Callable[[], None], *, reduce: bool) -> None:
        """Runs forward and backward of one micro-batch, both within `no_sync` where nothing is sent."""
        if isinstance(model, DistributedDataParallel):
            with nullcontext() if reduce else model.no_sync():
                compute()
            if reduce and not model.find_unused_parameters:
                _refuse_unused(model)
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(reduce)
            compute()

    def prepare_optimizer(self, optimizer: Optimizer, mesh: Mesh) -> None:
        """Lets the optimizer step on local shards where tensor parallelism has made some."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            step_on_local_shards(optimizer, OwnShards())


def _refuse_unused(model: DistributedDataParallel) -> None:
    """Names parameters without a gradient, for which torch would raise in the next step without naming them."""
    unused = [fqn for fqn, each in model.module.named_parameters() if each.requires_grad and each.grad is None]
    if unused:
        raise ValueError(
            f"the loss did not use {len(unused)} parameters ({', '.join(unused[:3])} ...), so ranks do not know that "
            "their gradients are complete; set buckets.find_unused_parameters=True, or freeze them"
        )


def _sum(state: tuple[dist.ProcessGroup, torch.dtype | None], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sums a bucket; DDP's own hook would average, but the loss is already per token of the global batch."""
    group, dtype = state
    buffer = bucket.buffer()
    sent = buffer if dtype is None else buffer.to(dtype)
    work = dist.all_reduce(sent, group=group, async_op=True)

    def take(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return done.value()[0].to(buffer.dtype)

    return work.get_future().then(take)
