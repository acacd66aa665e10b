"""Causal grouped-query attention with rotary positions; its core is a module, so that another can take its place."""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.layers.norm import RMSNorm
from models.layers.rotary import Rotary, apply_rotary

# B batch, S sequence, T keys (S, or those of a cache too), D model, H query heads, G key-value heads, K head_dim

_HALF = (torch.bfloat16, torch.float16)


class SdpaCore(nn.Module):
    """Attention of queries to keys and values that all lie on this rank, through torch's fused kernels."""

    def prepare(self, document_ids: Tensor | None) -> Tensor | None:
        """What every block's attention needs to know of this micro-batch.

        Args:
            document_ids: Document of each token, int64 [B, S]. None: each row is one document.

        Returns:
            Which key each query may see, bool [B, 1, S, S]; None for plain causal attention.
        """
        if document_ids is None:
            return None
        same = document_ids[:, :, None] == document_ids[:, None, :]
        return same.tril_().unsqueeze(1)

    def forward(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, inputs: Tensor | None) -> Tensor:
        """Attends.

        Args:
            q_BSHK: Queries, [B, S, H, K].
            k_BSGK: Keys, [B, S, G, K]; G divides H.
            v_BSGK: Values, [B, S, G, K].
            inputs: What `prepare` returned.

        Returns:
            Weighted values, [B, S, H, K].
        """
        return attend(q_BSHK, k_BSGK, v_BSGK, mask=inputs, causal=inputs is None)


def attend(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, *, mask: Tensor | None, causal: bool) -> Tensor:
    """Attends through torch's fused kernels.

    Args:
        q_BSHK: Queries, [B, S, H, K].
        k_BTGK: Keys, [B, T, G, K]; G divides H.
        v_BTGK: Values, [B, T, G, K].
        mask: Which key each query may see, bool [B or 1, 1, S, T]; None: as `causal` says.
        causal: Each query sees the keys up to its own place, without a mask and with S = T only; else it sees all.

    Returns:
        Weighted values, [B, S, H, K].
    """
    grouped = q_BSHK.shape[2] != k_BTGK.shape[2]
    # Off the CPU only the flash kernel knows groups, and it takes neither masks nor float32; what falls through
    # to torch's reference form would hold all S x T scores.
    if grouped and q_BSHK.device.type != "cpu" and (mask is not None or q_BSHK.dtype not in _HALF):
        k_BTGK, v_BTGK = (repeat_groups(x, q_BSHK.shape[2]) for x in (k_BTGK, v_BTGK))
        grouped = False
    out_BHSK = F.scaled_dot_product_attention(
        q_BSHK.transpose(1, 2),
        k_BTGK.transpose(1, 2),
        v_BTGK.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=grouped,
    )
    return out_BHSK.transpose(1, 2)


class Attention(nn.Module):
    """Projections around an attention core; counts of heads follow from the projections' outputs, which may be parts.

    Args:
        width: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        head_dim: Components of a head.
        bias: Give q, k and v (not o) a bias.
        qk_norm_eps: Normalize queries and keys by head with this epsilon; None: do not.
    """

    def __init__(
        self, *, width: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool, qk_norm_eps: float | None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, width, bias=False)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.core: nn.Module = SdpaCore()

    def forward(self, x_BSD: Tensor, *, rotary: Rotary, attention_inputs: Any) -> Tensor:
        """Attends within each document.

        Args:
            x_BSD: Normalized residual stream, [B, S, D].
            rotary: Cosines and sines of the positions.
            attention_inputs: What the core's `prepare` returned.

        Returns:
            What is added to the residual stream, [B, S, D].
        """
        q_BSHK = rearrange(self.q_proj(x_BSD), "b s (h k) -> b s h k", k=self.head_dim)
        k_BSGK = rearrange(self.k_proj(x_BSD), "b s (g k) -> b s g k", k=self.head_dim)
        v_BSGK = rearrange(self.v_proj(x_BSD), "b s (g k) -> b s g k", k=self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        q_BSHK, k_BSGK = apply_rotary(q_BSHK, rotary), apply_rotary(k_BSGK, rotary)
        out_BSHK = self.core(q_BSHK, k_BSGK, v_BSGK, attention_inputs)
        out_BSD: Tensor = self.o_proj(rearrange(out_BSHK, "b s h k -> b s (h k)"))
        return out_BSD


def repeat_groups(x_BSGK: Tensor, num_heads: int) -> Tensor:
    """Keys or values once for each query head that they serve, [B, S, H, K].

    Args:
        x_BSGK: Keys or values, [B, S, G, K].
        num_heads: Query heads, a multiple of G.
    """
    return x_BSGK.repeat_interleave(num_heads // x_BSGK.shape[2], dim=2)
