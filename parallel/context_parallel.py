"""Splits sequences over the `cp` axis by attention cores that are its own, as torch's lack much.

Torch's `context_parallel` has no rule for the CPU's flash attention and none for packed documents, and replaces the
attention function of all code that runs in its context, where a model here says which of its modules to replace. Two
cores are collectives around the model's own core; the ring adds up the same fused kernels by their log-sum-exps.
"""

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Private: no public collective with a gradient can be traced by torch.compile.
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

# Private: no public way leaves modes aside; test_plan_builds makes a mask within one.
from torch.utils._mode_utils import no_dispatch

from parallel.config import ContextParallelMethod, ParallelConfig
from parallel.plan import ParallelPlan, matching
from parallel.ring_attention import RingCore
from parallel.sequence_cut import SequenceCut
from parallel.whole_rows import OfWholeRows, RowSums

# B batch, S this rank's tokens, T tokens of whole sequences, H query heads, G key-value heads, K head_dim


class AttentionCore(Protocol):
    """What a plan's `attention_cores` are."""

    def prepare(self, document_ids: Tensor | None) -> Tensor | None:
        """Which key each query may see, bool [B, 1, T, T], from documents [B, T]; None without them."""
        ...

    def __call__(self, q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, inputs: Tensor | None) -> Tensor:
        """Weighted values [B, S, H, K] under a mask [B or 1, 1, S, T]; None: causal, with S = T."""
        ...


class AllGatherCore(nn.Module):
    """Gathers the keys and values of whole sequences and attends to those up to this rank's last token.

    Source: Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2.

    Args:
        inner: The core of the model.
        mesh: The 1-D mesh of the ranks that share a sequence.
        cut: How they do.
    """

    def __init__(self, inner: nn.Module, mesh: DeviceMesh, cut: SequenceCut) -> None:
        # Not at the top: it loads torch's compiler, which costs every import of `parallel` a second.
        from torch.nn.attention.bias import causal_lower_right

        super().__init__()
        self.inner, self.mesh, self.cut, self.causal_mask = inner, mesh, cut, causal_lower_right

    def prepare(self, document_ids: Tensor | None) -> Tensor | None:
        """What every block's attention needs to know of this micro-batch.

        Args:
            document_ids: Document of each token of whole sequences, int64 [B, T]. None: each row is one.

        Returns:
            Which key up to its last token each of this rank's queries may see, bool [B, 1, S, keys].
        """
        if document_ids is None:
            return None
        own = self.cut.part(document_ids)
        stop = (self.cut.rank + 1) * own.shape[1]
        same = own[:, :, None] == document_ids[:, None, :stop]
        return same.tril_(stop - own.shape[1]).unsqueeze(1)

    def forward(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, inputs: Tensor | None) -> Tensor:
        """Weighted values of this rank's queries, [B, S, H, K].

        Args:
            q_BSHK: Queries of this rank's tokens, [B, S, H, K].
            k_BSGK: Their keys, [B, S, G, K].
            v_BSGK: Their values, [B, S, G, K].
            inputs: What `prepare` returned.
        """
        num_own = q_BSHK.shape[1]
        stop = (self.cut.rank + 1) * num_own
        own = DTensor.from_local(torch.stack([k_BSGK, v_BSGK]), self.mesh, [Shard(2)], run_check=False)
        # Each rank's queries give a part of the gradient of all keys.
        whole = own.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        k_BTGK, v_BTGK = whole[:, :, :stop].unbind()
        mask = self._causal(num_own, stop) if inputs is None else inputs
        out_BSHK: Tensor = self.inner(q_BSHK, k_BTGK, v_BTGK, mask)
        return out_BSHK

    def _causal(self, num_own: int, num_keys: int) -> Any:
        """Torch's mark for a causal mask of which the last query sees all keys."""
        if torch.compiler.is_compiling():
            return self.causal_mask(num_own, num_keys)
        # It is a tensor without values, which cannot be made where a mode sees ops, as in selective checkpointing.
        with no_dispatch():
            return self.causal_mask(num_own, num_keys)


class UlyssesCore(nn.Module):
    """Exchanges a part of the sequence with all heads for whole sequences with a part of the heads, and back.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses".

    Args:
        inner: The core of the model, which attends as on one process.
        group: The ranks that share a sequence.
        degree: Their number, which divides H.
    """

    def __init__(self, inner: nn.Module, group: dist.ProcessGroup, degree: int) -> None:
        super().__init__()
        self.inner, self.group, self.degree = inner, group, degree

    def prepare(self, document_ids: Tensor | None) -> Any:
        """What the model's core needs to know of whole sequences.

        Args:
            document_ids: Document of each token of whole sequences, int64 [B, T]. None: each row is one.
        """
        return self.inner.prepare(document_ids)  # type: ignore[operator]  # nn.Module's attributes have any type

    def forward(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, inputs: Any) -> Tensor:
        """Weighted values of this rank's queries, [B, S, H, K].

        Args:
            q_BSHK: Queries of this rank's tokens, [B, S, H, K].
            k_BSGK: Their keys, [B, S, G, K].
            v_BSGK: Their values, [B, S, G, K].
            inputs: What `prepare` returned.
        """
        num_heads, num_kv_heads = q_BSHK.shape[2], sent_kv_heads(k_BSGK.shape[2], self.degree)
        repeats = num_kv_heads // k_BSGK.shape[2]
        if repeats > 1:
            k_BSGK, v_BSGK = (each.repeat_interleave(repeats, dim=2) for each in (k_BSGK, v_BSGK))
        # For each rank its heads of all three, in one exchange.
        parts = [each.unflatten(2, (self.degree, -1)) for each in (q_BSHK, k_BSGK, v_BSGK)]
        theirs = torch.cat(parts, dim=3).movedim(2, 0)
        own = self._exchange(theirs).movedim(0, 1).flatten(1, 2)
        sizes = [count // self.degree for count in (num_heads, num_kv_heads, num_kv_heads)]
        out_BTHK: Tensor = self.inner(*own.split(sizes, dim=2), inputs)
        back = self._exchange(out_BTHK.unflatten(1, (self.degree, -1)).movedim(1, 0))
        return back.movedim(0, 2).flatten(2, 3)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Sends the r-th part along the first dim to rank r; gives what the ranks sent, in their order."""
        sizes = [1] * self.degree
        received: Tensor = all_to_all(parts.contiguous(), sizes, sizes, self.group)
        return received


def sent_kv_heads(num_kv_heads: int, degree: int) -> int:
    """Key-value heads that ulysses sends: repeated where they are too few for every rank to get as many.

    Args:
        num_kv_heads: Those that a rank computes.
        degree: Ranks that share a sequence.
    """
    return math.lcm(num_kv_heads, degree)


def check_context_parallel(config: ParallelConfig, plan: ParallelPlan, device: torch.device) -> None:
    """Refuses what no core can do, before anything is changed.

    Args:
        config: The layout with every degree resolved.
        plan: What the model declares.
        device: Where it will run.

    Raises:
        ValueError: If the model names no cores, or a kernel does not take its heads.
    """
    if config.cp == 1:
        return
    if not plan.attention_cores:
        raise ValueError(
            f"cp={config.cp} replaces the modules in which tokens of a sequence meet, but the plan names no "
            "attention_cores; name them, or use cp=1"
        )
    head_dim = plan.shape.head_dim
    if config.cp_method == "ring" and device.type == "cuda" and head_dim % 8:
        raise ValueError(
            f"on a GPU the kernels of cp_method='ring' take heads of multiples of 8 components, not head_dim="
            f"{head_dim}; use cp_method='allgather' or 'ulysses'"
        )


def apply_context_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, method: ContextParallelMethod
) -> None:
    """Replaces a model's attention cores, and what looks at whole rows, by modules that see whole sequences.

    Args:
        model: The whole model, already split by tensor parallelism where that is in use.
        mesh: The `cp` view.
        plan: Names the modules to replace.
        method: How a core sees whole sequences.
    """
    group = mesh.get_group()
    cut = SequenceCut(degree=mesh.size(), rank=mesh.get_local_rank(), balanced=method == "ring")
    modules = dict(model.named_modules())
    for fqn in (fqn for pattern in plan.attention_cores for fqn in matching(pattern, modules)):
        cores: dict[ContextParallelMethod, nn.Module] = {
            "allgather": AllGatherCore(modules[fqn], mesh, cut),
            "ring": RingCore(group, cut),
            "ulysses": UlyssesCore(modules[fqn], group, cut.degree),
        }
        model.set_submodule(fqn, cores[method])
    for fqn in (fqn for pattern in plan.row_sums for fqn in matching(pattern, modules)):
        model.set_submodule(fqn, RowSums(group))
    for fqn in (fqn for pattern in plan.of_whole_rows for fqn in matching(pattern, modules)):
        model.set_submodule(fqn, OfWholeRows(modules[fqn], group, cut))
