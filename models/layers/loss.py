"""The output head, whose loss never holds the logits of more than a chunk of tokens."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from parallel.batch import IGNORE_INDEX
from parallel.tensor_parallel import HeadSplit

# B batch, S sequence, T tokens (B * S), C tokens of a chunk, D model, V vocabulary, W the part of V on this rank

CHUNK_TOKENS = 256
"""Tokens of a chunk on the CPU: fewer make the matmuls slower, more gain nothing (vocabulary 49,152, width 576)."""

CHUNK_TOKENS_OF_ACCELERATOR = 1024
"""Tokens of a chunk elsewhere: each chunk reads the weight twice and its gradient once, which must not dominate."""


class LossHead(nn.Module):
    """A linear map to the vocabulary that computes the loss itself.

    Attributes:
        weight: [V, D], or the rank's part of V as a DTensor.
        tensor_parallel: How the vocabulary is split over ranks; None: it is not.
        chunk_tokens: Tokens whose logits exist at a time in the loss; None: by the device.

    Args:
        width: Width of the residual stream.
        vocab_size: Entries of the vocabulary.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        # As nn.Linear does: what empty memory holds may be NaN.
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.tensor_parallel: HeadSplit | None = None
        self.chunk_tokens: int | None = None

    def forward(self, x_BSD: Tensor, labels: Tensor | None = None) -> Tensor:
        """The summed loss, or the logits where there are no labels.

        Args:
            x_BSD: Normalized residual stream, [B, S, D]; the whole sequence on every rank.
            labels: Token to be predicted at each position, int64 [B, S]; `IGNORE_INDEX` for none.

        Returns:
            Sum over predicted positions of -log p, a float32 scalar (float64 in float64 models), zero where
            nothing is predicted; without labels the logits of the whole vocabulary, [B, S, V].
        """
        split = self.tensor_parallel
        weight_WD = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        if labels is None:
            logits_BSW = F.linear(x_BSD, weight_WD)
            return logits_BSW if split is None else _GatherVocabulary.apply(logits_BSW, split)
        chunk = self.chunk_tokens or (CHUNK_TOKENS if x_BSD.device.type == "cpu" else CHUNK_TOKENS_OF_ACCELERATOR)
        # Within a Function's forward gradients are off, so it cannot see for itself whether they are wanted.
        wanted = torch.is_grad_enabled()
        return _ChunkedCrossEntropy.apply(x_BSD.flatten(0, 1), weight_WD, labels.flatten(), split, chunk, wanted)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients chunk by chunk in forward, so that backward needs no logits.

    The weight's gradient is summed over chunks in the dtype of the weight, one rounding a chunk; of float16 in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_WD: Tensor, labels_T: Tensor, split: HeadSplit | None, chunk: int, wanted: bool
    ) -> Tensor:
        grad_x_TD = torch.empty_like(x_TD) if wanted and ctx.needs_input_grad[0] else None
        # A sum over many tokens may leave the range of float16, and no scale of the loss would reach it.
        sums = torch.float32 if weight_WD.dtype == torch.float16 else weight_WD.dtype
        grad_weight_WD = torch.zeros_like(weight_WD, dtype=sums) if wanted and ctx.needs_input_grad[1] else None
        loss = torch.zeros((), device=x_TD.device, dtype=_loss_dtype(x_TD))
        # One buffer for all chunks: at this size each allocation is mapped and zeroed by the system anew.
        buffer_CW = x_TD.new_empty(min(chunk, len(x_TD)), len(weight_WD))
        for start in range(0, len(x_TD), chunk):
            rows = slice(start, start + chunk)
            x_CD = x_TD[rows]
            logits_CW = torch.mm(x_CD, weight_WD.t(), out=buffer_CW[: len(x_CD)])
            chunk_loss, grad_CW, scale_C1 = _loss_and_gradient_(logits_CW, labels_T[rows].unsqueeze(1), split)
            loss += chunk_loss
            if grad_x_TD is not None:
                torch.mm(grad_CW, weight_WD, out=grad_x_TD[rows]).mul_(scale_C1)
            if grad_weight_WD is not None:
                if sums == weight_WD.dtype:
                    grad_weight_WD.addmm_(grad_CW.t(), x_CD * scale_C1)
                else:
                    grad_weight_WD.add_(grad_CW.t() @ (x_CD * scale_C1))
        ctx.save_for_backward(grad_x_TD, grad_weight_WD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as the weight's gradient may be gigabytes; unless the graph will be walked again, which needs it
        # as it is (schedules that part the gradients of inputs and weights do that).
        # Private: no public call tells whether the graph is kept; test_loss walks it twice.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        scaled: list[Tensor | None] = []
        for each in ctx.saved_tensors:
            if each is None:
                scaled.append(None)
                continue
            # As a vector the factor takes part in type promotion, so it is not itself rounded to bfloat16.
            out = torch.empty_like(each) if keep else each
            scaled.append(torch.mul(each, grad.view(1), out=out))
        return (*scaled, None, None, None, None)


class _GatherVocabulary(torch.autograd.Function):
    """Joins logits that are split along the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits_BSW: Tensor, split: HeadSplit) -> Tensor:
        ctx.own = _own_entries(split)
        whole_TV = _gather_vocabulary(logits_BSW.flatten(0, 1), split)
        return whole_TV.contiguous().unflatten(0, logits_BSW.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSV: Tensor) -> tuple[Tensor, None]:
        return grad_BSV[..., ctx.own], None


def _loss_and_gradient_(logits_CW: Tensor, labels_C1: Tensor, split: HeadSplit | None) -> tuple[Tensor, Tensor, Tensor]:
    """Turns a chunk's logits into the gradient, in place where the dtype allows.

    Returns:
        The chunk's summed loss; the gradient of the loss by this rank's logits [C, W], which still lacks a factor a
        row; and these factors [C, 1]: it is cheaper to scale the D columns of what the gradient is multiplied with.

    Source of the gradient: d loss / d logits = softmax(logits) - onehot(label).
    """
    dtype = logits_CW.dtype
    gathered = None if split is None or split.loss_parallel else split
    if gathered is not None:
        logits_CW = _gather_vocabulary(logits_CW, gathered)
    logits_CW = logits_CW.to(_loss_dtype(logits_CW))
    valid_C1 = labels_C1 != IGNORE_INDEX
    targets_C1 = labels_C1.where(valid_C1, 0)
    total_C1, target_C1 = _exponentials_(logits_CW, targets_C1, None if gathered else split)
    loss = (total_C1.log() - target_C1).where(valid_C1, 0).sum()
    grad_CW = logits_CW if gathered is None else logits_CW[:, _own_entries(gathered)]
    factor_C1 = total_C1.reciprocal().where(valid_C1, 0)
    if dtype == torch.float16:
        # The total of a large vocabulary lies outside of its range.
        return loss, grad_CW.mul_(factor_C1).to(dtype), torch.ones_like(factor_C1, dtype=dtype)
    return loss, grad_CW.to(dtype), factor_C1.to(dtype)


def _exponentials_(logits_CW: Tensor, targets_C1: Tensor, split: HeadSplit | None) -> tuple[Tensor, Tensor]:
    """Overwrites logits by exp(logit - largest), less the total of the row at the target.

    Returns:
        The totals over the vocabulary, [C, 1], and the targets' logits less the largest, [C, 1].
    """
    empty = logits_CW.shape[1] == 0
    largest_C1 = logits_CW.new_full(targets_C1.shape, -torch.inf) if empty else logits_CW.amax(1, keepdim=True)
    if split is not None:
        dist.all_reduce(largest_C1, dist.ReduceOp.MAX, group=split.group)
    logits_CW.sub_(largest_C1)
    if split is None:
        target_C1 = logits_CW.gather(1, targets_C1)
        total_C1 = logits_CW.exp_().sum(1, keepdim=True)
        logits_CW.scatter_add_(1, targets_C1, -total_C1)
        return total_C1, target_C1
    own = _own_entries(split)
    mine_C1 = (targets_C1 >= own.start) & (targets_C1 < own.stop)
    sums_C2 = logits_CW.new_zeros(len(logits_CW), 2)
    places_C1 = (targets_C1 - own.start).where(mine_C1, 0)
    if not empty:
        sums_C2[:, 1:] = logits_CW.gather(1, places_C1).where(mine_C1, 0)
        torch.sum(logits_CW.exp_(), 1, keepdim=True, out=sums_C2[:, :1])
    dist.all_reduce(sums_C2, group=split.group)
    total_C1, target_C1 = sums_C2.split(1, dim=1)
    if not empty:
        logits_CW.scatter_add_(1, places_C1, (-total_C1).where(mine_C1, 0))
    return total_C1, target_C1


def _own_entries(split: HeadSplit) -> slice:
    part = -(-split.vocab_size // split.degree)
    return slice(min(split.rank * part, split.vocab_size), min((split.rank + 1) * part, split.vocab_size))


def _gather_vocabulary(logits_TW: Tensor, split: HeadSplit) -> Tensor:
    # Gathered along the vocabulary as leading dim, where the parts lie one after the other and padding comes last.
    part = -(-split.vocab_size // split.degree)
    own_PT = F.pad(logits_TW.t(), (0, 0, 0, part - logits_TW.shape[1])).contiguous()
    whole_PT = own_PT.new_empty(part * split.degree, len(logits_TW))
    dist.all_gather_single(whole_PT, own_PT, group=split.group)
    return whole_PT[: split.vocab_size].t()


def _loss_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
