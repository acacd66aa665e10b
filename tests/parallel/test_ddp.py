"""DDP and ZeRO-1: what they replicate, and what they refuse."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import Buckets, ParallelConfig, Precision, build_mesh, materialize, parallelize
from tests.parallel.small_model import CONFIG, adamw, batches, build, difference, train, whole
from tests.ranks import RankError, run_ranks


class WithUnusedLayer(Llama):
    """A model one of whose layers its forward leaves out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.extra = nn.Linear(4, 4, bias=False)

    def init_parameter(self, fqn: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if fqn.startswith("extra"):
            tensor.zero_()
        else:
            super().init_parameter(fqn, tensor, generator)


def step_with_unused_layer(buckets: Buckets, freeze: bool) -> float:
    config = ParallelConfig(data_parallel="ddp", buckets=buckets)
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = WithUnusedLayer(CONFIG).double()
    model.extra.requires_grad_(not freeze)
    trained = parallelize(model, mesh, config, llama_plan(CONFIG))
    materialize(trained)
    for step in range(2):
        result = trained.forward_backward(batches(mesh, step))
    return result.loss


def test_a_parameter_that_the_loss_does_not_use_is_named() -> None:
    with pytest.raises(RankError, match=r"did not use 1 parameters \(.*extra.weight .*find_unused_parameters=True"):
        run_ranks(2, step_with_unused_layer, Buckets(), False)


def test_an_unused_parameter_trains_where_it_is_looked_for_or_frozen() -> None:
    looked_for = run_ranks(2, step_with_unused_layer, Buckets(find_unused_parameters=True), False)
    frozen = run_ranks(2, step_with_unused_layer, Buckets(), True)
    assert looked_for == frozen


def gradients_between_ranks(backend: str) -> float:
    """The largest difference of a gradient from rank 0's, after a step of three micro-batches."""
    trained = build(ParallelConfig(data_parallel=backend))  # type: ignore[arg-type]
    trained.forward_backward(batches(trained.mesh, 0, 3))
    worst = 0.0
    for parameter in trained.named_parameters().values():
        assert parameter.grad is not None
        first = parameter.grad.clone()
        torch.distributed.broadcast(first, 0)
        worst = max(worst, (first - parameter.grad).abs().max().item())
    return worst


@pytest.mark.parametrize("backend", ["ddp", "zero1"])
def test_accumulation_leaves_every_rank_with_the_same_gradients(backend: str) -> None:
    assert run_ranks(2, gradients_between_ranks, backend) == [0.0, 0.0]


def bf16_losses(backend: str) -> tuple[list[float], set[torch.dtype]]:
    precision = Precision(compute="bfloat16", reduce="float32")
    trained = build(ParallelConfig(data_parallel=backend, precision=precision), dtype=torch.float32)  # type: ignore[arg-type]
    optimizer = trained.build_optimizer(adamw)
    losses = []
    for step in range(3):
        losses.append(trained.forward_backward(batches(trained.mesh, step)).loss)
        optimizer.step()
    dtypes = {parameter.dtype for parameter in trained.named_parameters().values()}
    dtypes |= {value.dtype for entries in optimizer.state.values() for value in entries.values()}
    return losses, dtypes


def test_bf16_compute_gives_the_losses_of_fully_shard_and_stores_float32() -> None:
    expected, _ = run_ranks(2, bf16_losses, "fsdp2")[0]
    for backend in ("ddp", "zero1"):
        losses, dtypes = run_ranks(2, bf16_losses, backend)[0]
        assert losses == pytest.approx(expected, rel=2e-4)
        assert dtypes == {torch.float32}
    alone, dtypes = run_ranks(1, bf16_losses, "none")[0]
    assert alone == pytest.approx(expected, rel=2e-4)
    assert dtypes == {torch.float32}


def test_data_parallel_without_several_gpus_says_that_it_runs_as_one_process() -> None:
    messages, losses, reference = run_ranks(1, data_parallel_on_this_machine)[0]
    assert any("it runs as data_parallel='none'" in message for message in messages)
    assert losses == reference


def data_parallel_on_this_machine() -> tuple[list[str], list[float], list[float]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(ParallelConfig(data_parallel="dp"), steps=2)
    reference = train(ParallelConfig(data_parallel="none"), steps=2)
    return [str(each.message) for each in caught], run.losses, reference.losses


def state_survives(fields: dict[str, Any]) -> float:
    """The largest difference after an optimizer takes its own state dict back and goes on."""
    finals = []
    for again in (False, True):
        trained = build(ParallelConfig(**fields))
        optimizer = trained.build_optimizer(adamw)
        for step in range(3):
            trained.forward_backward(batches(trained.mesh, step))
            optimizer.step()
            if again:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        finals.append({fqn: whole(each) for fqn, each in trained.named_parameters().items()})
    return max(difference(finals[0][fqn], finals[1][fqn]) for fqn in finals[0])


@pytest.mark.parametrize("fields", [{"data_parallel": "zero1"}, {"data_parallel": "ddp"}, {}])
def test_an_optimizer_goes_on_from_its_own_state_dict(fields: dict[str, Any]) -> None:
    assert run_ranks(3, state_survives, fields) == [0.0] * 3
