"""DDP and ZeRO-1: what they replicate, and what they refuse."""

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch

from parallel import Buckets, CollectiveCounter, ParallelConfig, Precision
from parallel.ledger.live import storage_bytes
from tests.parallel.branching_model import build_branching, marked
from tests.parallel.small_model import CONFIG, adamw, batches, build, difference, train, whole
from tests.ranks import RankError, run_ranks


def step_with_unused_layer(buckets: Buckets, freeze: bool) -> float:
    trained = build_branching(ParallelConfig(data_parallel="ddp", buckets=buckets), freeze=freeze)
    for step in range(2):
        result = trained.forward_backward(marked(trained.mesh, step, 1, set()))
    return result.loss


def test_a_parameter_that_the_loss_does_not_use_is_named() -> None:
    with pytest.raises(RankError, match=r"did not use 1 parameters \(.*extra.weight .*find_unused_parameters=True"):
        run_ranks(2, step_with_unused_layer, Buckets(), False)


def test_an_unused_parameter_trains_where_it_is_looked_for_or_frozen() -> None:
    looked_for = run_ranks(2, step_with_unused_layer, Buckets(find_unused_parameters=True), False)
    promised = run_ranks(2, step_with_unused_layer, Buckets(static_graph=True), False)
    frozen = run_ranks(2, step_with_unused_layer, Buckets(), True)
    assert looked_for == frozen == promised


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


def is_freed() -> bool:
    """Whether a model that nobody refers to is gone after a step."""
    trained = build(ParallelConfig(data_parallel="ddp"))
    trained.forward_backward(batches(trained.mesh, 0))
    module = weakref.ref(trained.model)
    del trained
    gc.collect()
    return module() is None


def test_a_model_that_is_let_go_of_is_freed_with_its_process_group() -> None:
    assert run_ranks(2, is_freed) == [True, True]


def gradients_in_buckets(num_micro_batches: int) -> tuple[int, int]:
    """Number of memory blocks behind all gradients, and their bytes."""
    trained = build(ParallelConfig(data_parallel="ddp"))
    trained.forward_backward(batches(trained.mesh, 0, num_micro_batches))
    gradients = [each.grad for each in trained.named_parameters().values() if each.grad is not None]
    blocks = {each.untyped_storage().data_ptr() for each in gradients}
    return len(blocks), storage_bytes(gradients)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_gradients_are_views_of_the_buckets_and_take_no_memory_of_their_own(num_micro_batches: int) -> None:
    for num_blocks, num_bytes in run_ranks(2, gradients_in_buckets, num_micro_batches):
        assert num_blocks == 1
        assert num_bytes == 8 * CONFIG.num_parameters


def compressed(reduce: str) -> tuple[dict[torch.dtype, int], torch.Tensor, set[torch.dtype]]:
    """Bytes that backward sums by dtype, the summed gradients, and the dtypes in which they are stored."""
    config = ParallelConfig(data_parallel="ddp", precision=Precision(reduce=reduce))  # type: ignore[arg-type]
    trained = build(config, dtype=torch.float32)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(batches(trained.mesh, 0))
    summed: dict[torch.dtype, int] = {}
    for each in counter.records:
        if each.phase == "backward":
            summed[each.dtype] = summed.get(each.dtype, 0) + each.payload_bytes
    gradients = [each.grad for each in trained.named_parameters().values() if each.grad is not None]
    return summed, torch.cat([each.flatten() for each in gradients]), {each.dtype for each in gradients}


def test_gradients_compressed_to_bf16_send_half_and_are_kept_in_float32() -> None:
    (full, expected, _), *_ = run_ranks(2, compressed, "stored")
    (half, found, dtypes), (_, of_other, _) = run_ranks(2, compressed, "bfloat16")
    assert full == {torch.float32: 4 * CONFIG.num_parameters}
    assert half == {torch.bfloat16: 2 * CONFIG.num_parameters}
    assert dtypes == {torch.float32}
    assert torch.equal(found, of_other)
    # Each summand and the sum are rounded to 8 bits.
    assert 0 < difference(found, expected) < 2 * 2**-8


def warnings_of_a_step() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = build(ParallelConfig(data_parallel="ddp"))
        trained.forward_backward(batches(trained.mesh, 0, 2))
    return [str(each.message) for each in caught]


def test_torch_has_nothing_to_warn_of() -> None:
    assert run_ranks(2, warnings_of_a_step) == [[], []]


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
