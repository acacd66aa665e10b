"""The backend of one process: no collective; the reference of every parity test."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from parallel.backend import Backend
from parallel.compute_dtype import in_compute_dtype
from parallel.config import ParallelConfig, ReduceGradients
from parallel.mesh import Mesh
from parallel.plan import ParallelPlan


class OneProcess(Backend):
    """Leaves the model as it is."""

    wraps_before_materialize = True
    default_reduce_gradients: ReduceGradients = "last"

    def casts(self, config: ParallelConfig) -> bool:
        """Always."""
        return True

    def wrap(self, model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> nn.Module:
        """The model, or the model in another compute dtype; there are no ranks to sum over, so no reduce dtype."""
        return in_compute_dtype(model, config, plan)

    def run_micro_batch(self, model: nn.Module, compute: Callable[[], None], *, reduce: bool) -> None:
        """Runs forward and backward of one micro-batch."""
        compute()

    def prepare_optimizer(self, optimizer: Optimizer, mesh: Mesh) -> None:
        """Does nothing: the optimizer works on the parameters themselves."""
