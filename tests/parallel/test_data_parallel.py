"""`dp` on several GPUs, which no machine here has: torch's own `DataParallel` over copies that stay on one device."""

import dataclasses
import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import comm
from torch.utils._python_dispatch import TorchDispatchMode

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import ParallelConfig, Precision
from parallel.compute_dtype import in_compute_dtype
from parallel.data_parallel import OneProcessManyDevices, SummedDataParallel
from parallel.layout import resolve
from parallel.ledger.block_sizes import BatchShape
from parallel.ledger.parts import model_parts
from parallel.ledger.replicas_of_one_process import predict_replicas

BF16 = Precision(compute="bfloat16", reduce="float32")
CONFIG = LlamaConfig.preset("debug", num_layers=2)


@contextmanager
def several_devices(count: int) -> Iterator[Counter[str]]:
    """Torch's wrapper sees so many GPUs; what it would send between them is counted, and stays where it is."""
    sent: Counter[str] = Counter()

    def broadcast(tensors: Sequence[Tensor], devices: Sequence[int]) -> list[list[Tensor]]:
        sent["parameters to others"] += sum(each.nbytes for each in tensors) * (len(devices) - 1)
        return [[each.clone() for each in tensors] for _ in devices]

    def scatter(tensor: Tensor, devices: Sequence[int], sizes: Any = None, dim: int = 0, streams: Any = None) -> Any:
        parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
        what = "losses and their gradients" if tensor.is_floating_point() else "tokens to others"
        sent[what] += sum(each.nbytes for each in parts[1:])
        return tuple(each.clone() for each in parts)

    def gather(tensors: Sequence[Tensor], dim: int, destination: int) -> Tensor:
        sent["losses and their gradients"] += sum(each.nbytes for each in tensors[1:])
        return torch.cat(list(tensors), dim)

    def reduce_add(inputs: Sequence[Sequence[Tensor]], destination: int) -> list[Tensor]:
        sent["gradients to the first"] += sum(each.nbytes for row in inputs[1:] for each in row)
        return [torch.stack(list(each)).sum(0) for each in zip(*inputs, strict=True)]

    def one_by_one(replicas: Any, inputs: Any, kwargs: Any, devices: Any = None) -> list[Any]:
        return [each(*own, **named) for each, own, named in zip(replicas, inputs, kwargs, strict=True)]

    wrapper = importlib.import_module("torch.nn.parallel.data_parallel")
    own = {"broadcast_coalesced": broadcast, "scatter": scatter, "gather": gather, "reduce_add_coalesced": reduce_add}
    with ExitStack() as stack:
        for name, instead in own.items():
            stack.enter_context(mock.patch.object(comm, name, instead))
        for name, instead in {
            "_get_available_device_type": lambda: "cuda",
            "_get_all_device_indices": lambda: list(range(count)),
            "_check_balance": lambda _: None,
            "parallel_apply": one_by_one,
        }.items():
            stack.enter_context(mock.patch.object(wrapper, name, instead))
        yield sent


class _Dtypes(TorchDispatchMode):
    """Dtypes of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.update(each.dtype for each in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("count", "rows"), [(2, 4), (3, 4), (8, 4)])
@pytest.mark.parametrize("precision", [Precision(), BF16])
def test_replicas_compute_in_the_dtype_asked_for_and_send_what_is_predicted(
    count: int, rows: int, precision: Precision
) -> None:
    config = ParallelConfig(data_parallel="dp", precision=precision)
    plan = llama_plan(CONFIG)
    # Broadcasts refuse tensors of a CPU.
    with torch.device("meta"):
        model = Llama(CONFIG)
        tokens = torch.zeros(rows, 64, dtype=torch.int64)
    model.get_parameter("norm.weight").requires_grad_(False)
    with several_devices(count) as sent, _Dtypes() as dtypes:
        wrapped = SummedDataParallel(in_compute_dtype(model, config, plan))
        wrapped.src_device_obj = torch.device("meta")
        wrapped(tokens, positions=tokens, document_ids=tokens, labels=tokens).backward()
    assert dtypes.seen == {precision.compute_dtype or torch.float32}
    assert all((each.grad is not None) == each.requires_grad for each in model.parameters())
    batch = BatchShape(num_micro_batches=1, micro_batch=rows, sequence_length=64, has_documents=True)
    predicted = predict_replicas(model_parts(model, resolve(config, 1), plan), batch, count)
    assert predicted is not None
    assert sent == predicted.sent_bytes


def test_what_is_made_of_blocks_for_one_gpu_is_refused_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    backend = OneProcessManyDevices()
    plain = ParallelConfig(data_parallel="dp", precision=BF16)
    mesh: Any = None
    backend.check(mesh, plain, llama_plan(CONFIG))
    with pytest.raises(ValueError, match="on 2 GPUs copies modules, but not what compile=False or activation"):
        backend.check(mesh, dataclasses.replace(plain, activation_checkpointing="full"), llama_plan(CONFIG))
