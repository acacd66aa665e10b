"""What is known of the ops by which torch communicates: their kind, payload, group and handle."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Kind = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
]

OPS: dict[str, tuple[Kind, int | None]] = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 0),
    "c10d::scatter_": ("scatter", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "c10d::recv_any_source_": ("recv", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", None),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
}
"""For each op: what it is, and which argument holds the payload (None: the result does).

The payload is the larger side: the gathered tensor of an all-gather, the unreduced input of a reduce-scatter.
"""

SILENT = {
    "c10d::barrier",
    "c10d::monitored_barrier_",
    "_c10d_functional::_wrap_tensor_autograd",
}
"""Ops of those namespaces that send no payload of a model."""

WAIT = "_c10d_functional::wait_tensor"
"""Waits for a functional collective."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and tuples.

    Args:
        value: An argument or a result of an op.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from tensors_in(each)


def process_group_of(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an op's argument stands for, None for other arguments.

    Args:
        argument: Of an op.
    """
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:
            return None  # a ReduceOp
    if isinstance(argument, str) and argument.isdigit():
        # Private: functional collectives name their group, and no public call resolves the name.
        group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(
            dist.distributed_c10d.GroupName(argument)
        )
        return group
    return None


def work_of(result: Any) -> dist.Work | None:
    """The handle among the results of an op; functional collectives give none.

    Args:
        result: Of an op.
    """
    handles = result if isinstance(result, tuple) else (result,)
    return next((dist.Work.unbox(each) for each in handles if isinstance(each, torch.ScriptObject)), None)
