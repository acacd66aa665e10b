"""A sharding unit by hand: gathered before use, freed after it, its gradients scattered as sums."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

Log = Callable[[str, str, int], None]
"""Told what happens: the unit's name, what it does, and the bytes that this rank sends for it."""

# N ranks, C elements of a shard


class ShardedUnit:
    """Modules whose parameters are gathered, freed and reduced together.

    Between uses a rank holds 1/N of the unit's parameters, of their gradients and of the optimizer's state.
    `fully_shard` does the same, but cuts each parameter by rows where this cuts the whole unit as one flat row: its
    shards are DTensors with a name and a shape, which can be saved, and stepped on with rules of their own, one by one.

    Attributes:
        name: What the log calls it.
        parameters: The parameters as the modules see them: views of `whole_NC`.
        whole_NC: All of them, flattened and padded; without memory while they are not in use.
        shard_C: This rank's row of that, for the optimizer.
        next_in: The unit that runs after this one, in forward and in backward.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module], group: dist.ProcessGroup, log: Log) -> None:
        """Shards the parameters, and hooks into forward and backward.

        Args:
            name: What the log calls it.
            modules: In the order in which they run.
            group: The ranks to shard over; they hold the same values now.
            log: Told what happens.
        """
        self.name, self._group, self._log = name, group, log
        self.next_in: dict[Literal["forward", "backward"], ShardedUnit] = {}
        self.parameters = [parameter for module in modules for parameter in module.parameters()]
        self.whole_NC = _flat(self.parameters, group.size())
        self.shard_C = nn.Parameter(self.whole_NC[group.rank()].clone())
        start = 0
        for parameter in self.parameters:
            parameter.data = self.whole_NC.view(-1)[start : start + parameter.numel()].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._count_gradient)
            start += parameter.numel()
        self._gathering: dist.Work | None = None
        self._num_gradients = 0
        self.whole_NC.untyped_storage().resize_(0)
        modules[0].register_forward_pre_hook(lambda *_: self.use("forward"))
        modules[-1].register_forward_hook(self._after_forward)

    def use(self, phase: Literal["forward", "backward"]) -> None:
        """Waits until the parameters are there, the next unit's being on their way by then."""
        work = self.gather("gather")
        if phase in self.next_in:
            self.next_in[phase].gather("gather ahead")
        work.wait()
        self._log(self.name, phase, 0)

    def gather(self, why: str) -> dist.Work:
        """All-gather: starts to collect the rows of all ranks, unless that has happened."""
        if self._gathering is None:
            self.whole_NC.untyped_storage().resize_(self.whole_NC.nbytes)
            mine_C = self.shard_C.detach()
            self._gathering = dist.all_gather_single(self.whole_NC.view(-1), mine_C, self._group, async_op=True)
            self._log(self.name, why, self._sent_bytes)
        return self._gathering

    def free(self, why: str) -> None:
        """Gives the memory back; parameters, and views of them that autograd saved, come alive with the next gather."""
        self._gathering = None
        self.whole_NC.untyped_storage().resize_(0)
        self._log(self.name, why, 0)

    def reduce(self) -> None:
        """Reduce-scatter: each rank gets the sum of its row of the gradients, and all drop the whole ones."""
        whole_NC = _flat([parameter.grad for parameter in self.parameters], self._group.size())
        sum_C = torch.empty_like(self.shard_C)
        dist.reduce_scatter_single(sum_C, whole_NC.view(-1), group=self._group)
        self.shard_C.grad = sum_C if self.shard_C.grad is None else self.shard_C.grad + sum_C
        for parameter in self.parameters:
            parameter.grad = None
        self._log(self.name, "reduce-scatter", self._sent_bytes)

    def _after_forward(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            # Called with the gradient of the output, where the unit's part of backward begins.
            output.register_hook(lambda _gradient: self.use("backward"))
        self.free("free")

    def _count_gradient(self, _parameter: Tensor) -> None:
        """With the last gradient every op of backward that reads the parameters has run."""
        self._num_gradients = (self._num_gradients + 1) % len(self.parameters)
        if self._num_gradients == 0:
            self.free("free")
            self.reduce()

    @property
    def _sent_bytes(self) -> int:
        """Around a ring, N - 1 rows for either collective: `python -m recipes.ring` counts them."""
        return (self._group.size() - 1) * self.shard_C.nbytes


def _flat(tensors: Sequence[Tensor | None], num_ranks: int) -> Tensor:
    """A copy of some tensors, one after the other, and of zeros, in equal rows [N, C]: padded, so that N divides it."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors if tensor is not None])
    return nn.functional.pad(flat, (0, -flat.numel() % num_ranks)).view(num_ranks, -1)
