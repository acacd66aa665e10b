"""The backend of one process: no wrapper, no collective; the reference of every parity test."""

from collections.abc import Callable

from torch import nn

from parallel.config import ParallelConfig, ReduceGradients
from parallel.mesh import Mesh
from parallel.plan import ParallelPlan


class OneProcess:
    """Leaves the model as it is."""

    wraps_before_materialize = True
    default_reduce_gradients: ReduceGradients = "last"

    def wrap(self, model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> nn.Module:
        """Returns the model.

        Raises:
            ValueError: If a mixed precision is asked for.
        """
        if config.precision.compute != "stored" or config.precision.reduce != "stored":
            raise ValueError(
                f"data_parallel='none' computes in the stored dtype, but {config.precision} asks for another; "
                "use data_parallel='fsdp2', which runs on one rank too"
            )
        return model

    def run_micro_batch(self, model: nn.Module, compute: Callable[[], None], *, reduce: bool) -> None:
        """Runs forward and backward of one micro-batch."""
        compute()

    def reshard(self, model: nn.Module) -> None:
        """Does nothing: nothing is sharded."""
