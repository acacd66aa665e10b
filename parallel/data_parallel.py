"""The first generation: one process, one thread a GPU, gradients gathered on the first one."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.none import OneProcess
from parallel.plan import ParallelPlan


class OneProcessManyDevices(OneProcess):
    """The `dp` backend, kept to compare with."""

    wraps_before_materialize = False

    def check(self, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> None:
        """Refuses blocks that run in a forward of their own where there are several GPUs.

        Replicas would get that forward with the parameters of the first GPU.
        """
        if torch.cuda.device_count() > 1 and (config.compile or config.activation_checkpointing != "none"):
            raise ValueError(
                f"data_parallel='dp' on {torch.cuda.device_count()} GPUs copies modules, but not what compile="
                f"{config.compile} or activation_checkpointing={config.activation_checkpointing!r} makes of blocks; "
                "leave both out, or use data_parallel='ddp'"
            )

    def wrap(self, model: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan) -> nn.Module:
        """Wraps the model where there are several GPUs; warns where there are not, and leaves it as it is."""
        wrapped = super().wrap(model, mesh, config, plan)
        if torch.cuda.device_count() < 2:
            warnings.warn(
                f"data_parallel='dp' splits a batch over the GPUs of one process, but there are "
                f"{torch.cuda.device_count()} here: it runs as data_parallel='none'",
                stacklevel=2,
            )
            return wrapped
        return SummedDataParallel(wrapped)


class SummedDataParallel(nn.DataParallel[nn.Module]):
    """`DataParallel` of a model that returns a sum: what its devices return is added up, not stacked."""

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """The sum of scalars; logits one device's rows after the other's."""
        if isinstance(outputs[0], Tensor) and outputs[0].dim() == 0:
            return super().gather([each.unsqueeze(0) for each in outputs], output_device).sum()
        return super().gather(outputs, output_device)
