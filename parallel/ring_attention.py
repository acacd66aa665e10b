"""Attention over sequences of which each rank holds a part, with keys and values that travel around a ring."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Private: no public collective can be traced by torch.compile and leaves the waiting to the first use.
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all
from torch.distributed._functional_collectives import wait_tensor

from parallel.attention_kernels import attend, attend_backward
from parallel.sequence_cut import SequenceCut

# B batch, S this rank's tokens, H query heads, G key-value heads, K head_dim


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rank does with the keys and values that it holds at one time.

    Attributes:
        source: The rank of whose tokens they are.
        queries: The queries that see any of them.
        keys: The keys that any query sees.
        causal: Whether each query sees the keys up to its own place; else it sees all.
    """

    source: int
    queries: slice
    keys: slice
    causal: bool


def steps_of(cut: SequenceCut, num_tokens: int) -> tuple[Step, ...]:
    """The steps of a rank, each but the first with half of the scores of a square, whatever the rank.

    Its own tokens come first, so that every query has seen a key. Of an earlier rank's two pieces all queries see the
    first and none the second; of a later rank's pieces the queries of the second piece see both.

    Args:
        cut: The cut of sequences, balanced.
        num_tokens: S.
    """
    everything, half = slice(num_tokens), num_tokens // 2
    steps = [Step(source=cut.rank, queries=everything, keys=everything, causal=True)]
    for distance in range(1, cut.degree):
        source = (cut.rank - distance) % cut.degree
        earlier = source < cut.rank
        queries = everything if earlier else slice(half, num_tokens)
        steps.append(Step(source=source, queries=queries, keys=slice(half) if earlier else everything, causal=False))
    return tuple(steps)


class RingCore(nn.Module):
    """Attention core that sends keys and values once around the ranks, and their gradients in backward.

    Without documents it makes no mask, so memory grows with S alone.

    Args:
        group: The ranks that share a sequence.
        cut: How they do, balanced.
    """

    def __init__(self, group: dist.ProcessGroup, cut: SequenceCut) -> None:
        super().__init__()
        self.group, self.cut = group, cut

    def prepare(self, document_ids: Tensor | None) -> tuple[Tensor, ...]:
        """What every block's attention needs to know of this micro-batch.

        Args:
            document_ids: Document of each token of whole sequences, int64 [B, S * ranks]. None: each row is one.

        Returns:
            For each step which key each query may see, bool [B, 1, queries, keys]; nothing without documents.
        """
        if document_ids is None:
            return ()
        own = self.cut.part(document_ids)
        masks: list[Tensor] = []
        for step in steps_of(self.cut, own.shape[1]):
            theirs = self.cut.part(document_ids, step.source)
            same = own[:, step.queries, None] == theirs[:, None, step.keys]
            masks.append((same.tril_() if step.causal else same).unsqueeze(1))
        return tuple(masks)

    def forward(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        """Attends to the keys of whole sequences.

        Args:
            q_BSHK: Queries of this rank's tokens, [B, S, H, K].
            k_BSGK: Their keys, [B, S, G, K]; G divides H.
            v_BSGK: Their values, [B, S, G, K].
            inputs: What `prepare` returned.

        Returns:
            Weighted values, [B, S, H, K].
        """
        out: Tensor = _RingAttention.apply(q_BSHK, k_BSGK, v_BSGK, self, *inputs)
        return out

    def pass_on(self, tensor: Tensor) -> Tensor:
        """Sends a tensor to the next rank and gives that of the rank before, of the same shape."""
        size, degree, rank = tensor.shape[0], self.cut.degree, self.cut.rank
        to_next = [size * (each == (rank + 1) % degree) for each in range(degree)]
        from_last = [size * (each == (rank - 1) % degree) for each in range(degree)]
        received: Tensor = all_to_all(tensor, from_last, to_next, self.group)
        return received


class _RingAttention(torch.autograd.Function):
    """Adds up attention to each rank's keys by the log-sum-exps.

    Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; the balanced order is that of zigzag rings.
    """

    @staticmethod
    def forward(ctx: Any, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, ring: RingCore, *masks: Tensor) -> Tensor:
        steps, kv = steps_of(ring.cut, q_BSHK.shape[1]), torch.stack([k_BSGK, v_BSGK])
        q = q_BSHK.transpose(1, 2)
        out, lse = q, q  # the first step sets both
        for number, step in enumerate(steps):
            # Sent before it is used, so that it travels meanwhile.
            arriving = ring.pass_on(kv) if number + 1 < len(steps) else kv
            k, v = kv[:, :, step.keys].transpose(2, 3).unbind()
            mask = masks[number] if masks else None
            new_out, new_lse = attend(q[:, :, step.queries], k, v, mask=mask, causal=step.causal and mask is None)
            if number == 0:
                out, lse = new_out.to(new_lse.dtype, copy=True), new_lse.clone()
            else:
                rows = (slice(None), slice(None), step.queries)
                both = torch.logaddexp(lse[rows], new_lse)
                old_weight, new_weight = ((each - both).exp().unsqueeze(-1) for each in (lse[rows], new_lse))
                out[rows] = out[rows] * old_weight + new_out * new_weight
                lse[rows] = both
            # Also where recomputation has taken what `attend` gives from a store: nothing else would wait for what was
            # sent, and torch keeps that until somebody does.
            kv = wait_tensor(arriving)
        out = out.to(q.dtype)
        ctx.save_for_backward(q_BSHK, k_BSGK, v_BSGK, out, lse, *masks)
        ctx.ring = ring
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHK: Tensor) -> tuple[Tensor | None, ...]:
        q_BSHK, k_BSGK, v_BSGK, out, lse, *masks = ctx.saved_tensors
        ring: RingCore = ctx.ring
        steps, kv = steps_of(ring.cut, q_BSHK.shape[1]), torch.stack([k_BSGK, v_BSGK])
        q, grad = q_BSHK.transpose(1, 2), grad_BSHK.transpose(1, 2)
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        grad_own = grad_travelling = torch.zeros_like(kv, dtype=lse.dtype)
        for number, step in enumerate(steps):
            arriving = ring.pass_on(kv) if number + 1 < len(steps) else kv
            k, v = kv[:, :, step.keys].transpose(2, 3).unbind()
            mask, rows = masks[number] if masks else None, (slice(None), slice(None), step.queries)
            part_q, *part_kv = attend_backward(
                grad[rows], (q[rows], k, v), out[rows], lse[rows], mask=mask, causal=step.causal and mask is None
            )
            grad_q[rows] += part_q
            part = torch.stack([each.transpose(1, 2) for each in part_kv])
            part = F.pad(part, (0, 0, 0, 0, 0, kv.shape[2] - part.shape[2]))
            if number == 0:
                grad_own = part
            else:
                # They travel with the keys, one rank behind, and come home after the last step.
                grad_travelling = ring.pass_on(grad_travelling + part)
            kv = arriving
        grad_k, grad_v = (grad_own + grad_travelling).to(kv.dtype).unbind()
        return (grad_q.to(q.dtype).transpose(1, 2), grad_k, grad_v, None, *(None for _ in masks))
