"""Tests of the output head and its loss."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.layers.loss import LossHead
from parallel.batch import IGNORE_INDEX
from parallel.tensor_parallel import HeadSplit
from tests.ranks import run_ranks

BATCH, LENGTH, WIDTH = 2, 13, 6


def _inputs(vocab_size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab_size, (BATCH, LENGTH), generator=generator)
    labels[0, 3:7] = IGNORE_INDEX
    return x.to(dtype), weight.to(dtype), labels


def _head(weight: Tensor, chunk_tokens: int | None = None) -> LossHead:
    head = LossHead(weight.shape[1], weight.shape[0])
    head.weight = torch.nn.Parameter(weight.clone())
    head.chunk_tokens = chunk_tokens
    return head


def _reference(x: Tensor, weight: Tensor, labels: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = F.linear(x, weight).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    (loss * factor).backward()
    assert x.grad is not None and weight.grad is not None
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 26, 100, None])
def test_chunked_loss_and_gradients_equal_cross_entropy(chunk_tokens: int | None) -> None:
    x, weight, labels = _inputs(11)
    loss, grad_x, grad_weight = _reference(x, weight, labels, 0.3)
    head, x = _head(weight, chunk_tokens), x.requires_grad_()
    ours = head(x, labels=labels)
    (ours * 0.3).backward()
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours.detach(), loss, rtol=1e-14, atol=0)
    torch.testing.assert_close(x.grad, grad_x, rtol=0, atol=1e-14)
    torch.testing.assert_close(head.weight.grad, grad_weight, rtol=0, atol=1e-14)


def test_huge_logits_neither_overflow_nor_lose_the_loss() -> None:
    x, weight, labels = _inputs(11)
    loss, grad_x, _ = _reference(x * 1e3, weight, labels, 1.0)
    x = (x * 1e3).requires_grad_()
    ours = _head(weight, 4)(x, labels=labels)
    ours.backward()
    torch.testing.assert_close(ours.detach(), loss, rtol=1e-14, atol=0)
    torch.testing.assert_close(x.grad, grad_x, rtol=0, atol=1e-12)


def test_a_batch_with_nothing_to_predict_gives_zero_with_a_graph_and_zero_gradients() -> None:
    x, weight, labels = _inputs(11)
    head, x = _head(weight, 5), x.requires_grad_()
    loss = head(x, labels=torch.full_like(labels, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None and not x.grad.any()
    assert head.weight.grad is not None and not head.weight.grad.any()


def test_loss_of_a_bfloat16_model_is_float32_and_near_that_of_float32() -> None:
    x, weight, labels = _inputs(11, torch.bfloat16)
    loss, grad_x, grad_weight = _reference(x.float(), weight.float(), labels, 1.0)
    head, x = _head(weight, 4), x.requires_grad_()
    ours = head(x, labels=labels)
    ours.backward()
    assert ours.dtype == torch.float32 and head.weight.grad is not None
    torch.testing.assert_close(ours.detach(), loss, rtol=1e-2, atol=0)
    assert (head.weight.grad - grad_weight).norm() < 1e-2 * grad_weight.norm()
    assert x.grad is not None and (x.grad - grad_x).norm() < 1e-2 * grad_x.norm()


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    x, weight, labels = _inputs(11)
    labels[0, 0] = 11
    with pytest.raises(RuntimeError, match="out of bounds"):
        _head(weight)(x, labels=labels)


def test_backward_may_walk_the_graph_twice() -> None:
    x, weight, labels = _inputs(11)
    head, x = _head(weight, 5), x.requires_grad_()
    loss = head(x, labels=labels) * 0.3
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    second, grad_weight = torch.autograd.grad(loss, (x, head.weight))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(grad_weight, _reference(*_inputs(11), 0.3)[2], rtol=0, atol=1e-14)


class _Recorder(TorchDispatchMode):
    """Records operators and the sizes of all float tensors that they return or write into."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators.append(str(func))
        self.sizes += [
            each.numel() for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_floating_point()
        ]
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_float_tensor_is_larger_than_a_chunk_of_logits(dtype: torch.dtype) -> None:
    vocab_size, chunk_tokens = 1009, 8
    x, weight, labels = _inputs(vocab_size, dtype)
    assert weight.numel() < chunk_tokens * vocab_size < labels.numel() * vocab_size
    head, x = _head(weight, chunk_tokens), x.requires_grad_()
    with _Recorder() as seen:
        head(x, labels=labels).backward()
    assert max(seen.sizes) == chunk_tokens * vocab_size


def test_without_gradients_none_are_computed() -> None:
    x, weight, labels = _inputs(1009)
    with _Recorder() as seen, torch.no_grad():
        loss = _head(weight, 4)(x, labels=labels)
    assert not loss.requires_grad
    matmuls = [name for name in seen.operators if "mm" in name]
    assert len(matmuls) == -(-BATCH * LENGTH // 4)


def _loss_on_ranks(vocab_size: int, loss_parallel: bool) -> tuple[Tensor, ...]:
    rank, degree = dist.get_rank(), dist.get_world_size()
    part = -(-vocab_size // degree)
    x, weight, labels = _inputs(vocab_size)
    head, x = _head(weight[rank * part : (rank + 1) * part], 5), x.requires_grad_()
    assert dist.group.WORLD is not None
    head.tensor_parallel = HeadSplit(
        group=dist.group.WORLD, rank=rank, degree=degree, vocab_size=vocab_size, loss_parallel=loss_parallel
    )
    loss = head(x, labels=labels)
    (loss * 0.3).backward()
    logits = head(x)
    (grad_of_logits,) = torch.autograd.grad(logits.square().sum(), x)
    assert x.grad is not None and head.weight.grad is not None
    dist.all_reduce(x.grad)
    dist.all_reduce(grad_of_logits)
    return loss.detach(), x.grad, head.weight.grad, logits.detach(), grad_of_logits


@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize(("world_size", "vocab_size"), [(2, 12), (2, 11), (4, 5)])
def test_a_head_split_along_the_vocabulary_equals_the_whole(
    world_size: int, vocab_size: int, loss_parallel: bool
) -> None:
    # 5 entries on 4 ranks: the last rank holds none.
    x, weight, labels = _inputs(vocab_size)
    loss, grad_x, grad_weight = _reference(x, weight, labels, 0.3)
    x.requires_grad_()
    logits = F.linear(x, weight)
    (grad_of_logits,) = torch.autograd.grad(logits.square().sum(), x)
    results = run_ranks(world_size, _loss_on_ranks, vocab_size, loss_parallel)
    for theirs in results:
        torch.testing.assert_close(theirs[0], loss, rtol=1e-14, atol=0)
        torch.testing.assert_close(theirs[1], grad_x, rtol=0, atol=1e-14)
        torch.testing.assert_close(theirs[3], logits.detach(), rtol=0, atol=1e-14)
        torch.testing.assert_close(theirs[4], grad_of_logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([each[2] for each in results]), grad_weight, rtol=0, atol=1e-14)


def test_in_bf16_the_scale_of_gradients_is_not_rounded() -> None:
    """1/N in bfloat16 is off by up to 0.2 %, which would be a factor on every gradient of the model."""
    torch.manual_seed(0)
    head, num_tokens = LossHead(16, 50), 700
    x = torch.randn(7, 100, 16)
    labels = torch.randint(50, (7, 100))
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = x.to(dtype).detach().requires_grad_()
        weight = head.weight.detach().to(dtype)
        copied = LossHead(16, 50)
        copied.weight = torch.nn.Parameter(weight)
        (copied(inputs, labels) / num_tokens).backward()
        assert inputs.grad is not None
        gradients.append(inputs.grad.float())
    exact, rounded = gradients
    scale = ((rounded * exact).sum() / (exact * exact).sum()).item()
    assert abs(scale - 1) < 5e-4


@pytest.mark.parametrize(("vocab_size", "num_tokens", "size"), [(70_000, 3, 1e-3), (11, 5_000, 30.0)])
def test_in_float16_neither_a_large_vocabulary_nor_many_tokens_leave_the_range(
    vocab_size: int, num_tokens: int, size: float
) -> None:
    """The total of the first exceeds what float16 holds, and so does the sum of the second's gradients."""
    torch.manual_seed(0)
    head = LossHead(8, vocab_size).half()
    x_BSD = (size * torch.rand(1, num_tokens, 8)).half().requires_grad_()
    labels = torch.full((1, num_tokens), 3)
    (head(x_BSD, labels) * (64.0 / num_tokens)).backward()
    exact_head, exact_x = LossHead(8, vocab_size).double(), x_BSD.detach().double().requires_grad_()
    exact_head.load_state_dict({"weight": head.weight.detach().double()})
    (exact_head(exact_x, labels) * (64.0 / num_tokens)).backward()
    for found, exact in ((head.weight.grad, exact_head.weight.grad), (x_BSD.grad, exact_x.grad)):
        assert found is not None and exact is not None
        assert found.dtype == torch.float16
        assert ((found.double() - exact).abs().max() / exact.abs().max()).item() < 1e-2
