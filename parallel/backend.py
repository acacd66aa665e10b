"""What every data-parallel backend offers, so that the step, the loop and checkpoints need not know which one runs."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.config import ParallelConfig, ReduceGradients
from parallel.gradients import sharded_views
from parallel.mesh import Mesh
from parallel.plan import ParallelPlan

OptimizerFactory = Callable[[dict[str, nn.Parameter]], Optimizer]
"""Makes an optimizer from the trainable parameters by fqn."""


class Backend(Protocol):
    """One way of data parallelism; made anew for each model.

    What has a body here holds for backends whose parameters have the model's shapes, as DTensors or whole.

    Attributes:
        wraps_before_materialize: Whether `wrap` takes parameters on meta; False for backends that need values.
        default_reduce_gradients: When gradients are summed over ranks if the config does not say.
        holds_canonical: Whether `to_canonical` hands out what a rank holds and asks no other rank.
    """

    wraps_before_materialize: bool
    default_reduce_gradients: ReduceGradients
    holds_canonical: bool = True

    def check(self, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> None:
        """Refuses what this backend cannot do with a model or on a device, before anything is changed.

        Raises:
            ValueError: On every rank.
        """
        return

    def casts(self, config: ParallelConfig) -> bool:
        """Whether `wrap` casts whole models for a forward; blocks that backward computes again then cast themselves."""
        return False

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

    def build_optimizer(self, factory: OptimizerFactory, trainable: dict[str, nn.Parameter]) -> Optimizer:
        """Calls a factory with parameters whose shapes are those of the model."""
        return factory(trainable)

    def prepare_optimizer(self, optimizer: Optimizer, mesh: Mesh) -> None:
        """Makes an optimizer over the model's parameters work on what this rank has to update."""
        ...

    def reshard(self, model: nn.Module) -> None:
        """Frees whatever unsharded parameters are still held, so that `parameters()` are the sharded ones."""
        return

    def gathered(self) -> Iterable[Tensor]:
        """Memory of gathered parameters that `parameters()` may not show."""
        return ()

    def sharded_views(self, parameter: Tensor) -> frozenset[str]:
        """Names of the mesh's views along which a parameter is split; along the others it is replicated."""
        return sharded_views(parameter)

    def whole_shape(self, fqn: str, parameter: Tensor) -> torch.Size:
        """Shape of a whole parameter, whatever part of it this rank holds."""
        return parameter.shape

    def to_canonical(self, fqn: str, held: Tensor) -> Tensor:
        """What storage takes: a tensor or DTensor of the whole parameter's shape.

        All ranks that share the parameter call this together, for the same names in the same order.

        Args:
            fqn: The parameter's name.
            held: The parameter as this rank holds it, or optimizer state of that shape.

        Returns:
            `held` itself where it has that form already, so that filling it fills what is held.
        """
        return held

    def from_canonical(self, fqn: str, canonical: Tensor, held: Tensor) -> None:
        """Fills what a rank holds from what `to_canonical` made of it, which storage has filled meanwhile."""
        return
