"""What every data-parallel backend offers, so that the step and the loop need not know which one runs."""

from collections.abc import Callable
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from parallel.config import ParallelConfig, ReduceGradients
from parallel.mesh import Mesh
from parallel.plan import ParallelPlan


class Backend(Protocol):
    """One way of data parallelism.

    Attributes:
        wraps_before_materialize: Whether `wrap` takes parameters on meta; False for backends that need values.
        default_reduce_gradients: When gradients are summed over ranks if the config does not say.
    """

    wraps_before_materialize: bool
    default_reduce_gradients: ReduceGradients

    def wrap(self, model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> nn.Module:
        """Shards or wraps the model; gradients of the result are summed, never averaged, over ranks."""
        ...

    def run_micro_batch(self, model: nn.Module, compute: Callable[[], None], *, reduce: bool) -> None:
        """Runs forward and backward of one micro-batch.

        Args:
            model: What `wrap` returned.
            compute: Runs forward and backward.
            reduce: Whether gradients are summed over ranks in this micro-batch.
        """
        ...

    def prepare_optimizer(self, optimizer: Optimizer, mesh: Mesh) -> None:
        """Makes an optimizer over the model's parameters work on what this rank has to update."""
        ...

    def reshard(self, model: nn.Module) -> None:
        """Frees whatever unsharded parameters are still held, so that `parameters()` are the sharded ones."""
        ...
