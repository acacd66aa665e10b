"""Keeps the whole model on every rank through `DistributedDataParallel` and sums gradients while backward runs."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

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

    With tensor parallelism its parameters are DTensors, which torch's DDP does not take, and some schedules of a
    pipeline compute gradients where it does not see them; `fully_shard`'s replicating twin then does the same, one
    all-reduce a unit.
    """

    wraps_before_materialize = False
    # DDP holds whole gradients anyway, so nothing is saved by sending them more than once.
    default_reduce_gradients: ReduceGradients = "last"

    def casts(self, config: ParallelConfig) -> bool:
        """Whether whole models are cast; the replicating twin casts its units."""
        return config.tp == 1 and config.pp == 1

    def wrap(self, model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> nn.Module:
        """Wraps the model; rank 0's parameters are sent to all ranks first."""
        if mesh.degree("tp") > 1 or mesh.degree("pp") > 1:
            apply_fsdp2(
                model,
                mesh["loss"],
                replicate=True,
                units=plan.units,
                reshard_after_forward=False,
                sharding=config.sharding,
                precision=config.precision,
            )
            return model
        options = config.buckets
        wrapped = CheckedDdp(
            in_compute_dtype(model, config, plan),
            dict(model.named_parameters()),
            process_group=mesh.group("loss"),
            forward_sync_buffers=False,
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=True,
        )
        wrapped.register_comm_hook((mesh.group("loss"), config.precision.reduce_dtype), _sum)
        return wrapped

    def run_micro_batch(self, model: nn.Module, compute: Callable[[], None], *, reduce: bool) -> None:
        """Runs forward and backward of one micro-batch, both within `no_sync` where nothing is sent."""
        if isinstance(model, CheckedDdp):
            model.run(compute, reduce=reduce)
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(reduce)
            compute()

    def prepare_optimizer(self, optimizer: Optimizer, mesh: Mesh) -> None:
        """Lets the optimizer step on local shards where tensor parallelism has made some."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            step_on_local_shards(optimizer, OwnShards())


class CheckedDdp(DistributedDataParallel):
    """DDP that names parameters which a backward did not reach, and accumulates with `static_graph` too.

    Torch waits for a gradient of every parameter before it sums the last buckets. Where one does not come it leaves
    this step's gradients as they are, different on every rank, and raises in the next step.
    """

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], **options: Any) -> None:
        """Wraps a model.

        Args:
            model: What to call.
            parameters: Its parameters by the names that a user knows.
            options: Those of `DistributedDataParallel`.
        """
        super().__init__(model, **options)
        trainable = {fqn: each for fqn, each in parameters.items() if each.requires_grad}
        self._expected, self._reached = set(trainable), set[str]()
        self._has_summed = False
        for fqn, parameter in trainable.items():
            # Not a method: torch's reducer holds the parameters, out of the garbage collector's sight, so that a hook
            # that refers to this module would keep it, and the process group, for good.
            parameter.register_post_accumulate_grad_hook(functools.partial(_note, self._reached, fqn))

    def run(self, compute: Callable[[], None], *, reduce: bool) -> None:
        """Runs forward and backward of one micro-batch.

        Args:
            compute: Runs both.
            reduce: Whether gradients are summed over ranks.

        Raises:
            ValueError: If ranks would be left with gradients of their own, because backward did not reach a parameter.
        """
        # Torch learns a static graph from the first backward of all, which therefore has to be summed.
        learns = self.static_graph and not self._has_summed
        # Around both: torch decides in forward whether to sum.
        with nullcontext() if reduce or learns else self.no_sync():
            self._reached.clear()
            compute()
        self._has_summed = True
        if learns:
            self._expected = set(self._reached)
            if not reduce and dist.get_rank(self.process_group) > 0:
                # The sum enters that of the last micro-batch once, from the first rank.
                for parameter in self.parameters():
                    parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
        if not reduce or self.find_unused_parameters:
            return
        unused = sorted(self._expected - self._reached)
        if unused:
            promise = (
                "static_graph=True promises that each micro-batch uses the same parameters, but " * self.static_graph
            )
            raise ValueError(
                f"{promise}the loss did not use {len(unused)} parameters ({', '.join(unused[:3])} ...) in the last "
                "micro-batch, so ranks do not know that their gradients are complete; set "
                "buckets.find_unused_parameters=True, or freeze them"
            )


def _note(reached: set[str], fqn: str, _parameter: Tensor) -> None:
    reached.add(fqn)


def _sum(state: tuple[dist.ProcessGroup, torch.dtype | None], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sums a bucket; DDP's own hook would average, but the loss is already per token of the global batch."""
    group, dtype = state
    buffer = bucket.buffer()
    sent = buffer if dtype is None else buffer.to(dtype)
    work = dist.all_reduce(sent, group=group, async_op=True)

    def take(done: torch.futures.Future[Any]) -> Tensor:
        done.value()  # raises what the sum raised
        return sent.to(buffer.dtype)

    return work.get_future().then(take)
