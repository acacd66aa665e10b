"""Fused attention that also gives the log-sum-exp of its scores, by which results over parts of the keys add up."""

import torch
from torch import Tensor

# B batch, S queries, T keys, H query heads, G key-value heads (G divides H), K head_dim

_aten = torch.ops.aten
# No public function of torch gives the log-sum-exp outside of a compiled graph; test_attention_kernels runs or builds
# each of these.
_CPU, _CPU_BACKWARD = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_FLASH, _FLASH_BACKWARD = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_backward.default,
)
_EFFICIENT, _EFFICIENT_BACKWARD = (
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
)
_LSE_ALIGNMENT = 32
"""The efficient kernel fills rows of log-sum-exps up to a multiple of this, with infinity."""

_BIAS_ALIGNMENT = 16
"""It wants rows of its bias to start at a multiple of so many elements."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Attends; a query that sees no key gets a log-sum-exp so small that its result has no weight in any sum.

    Args:
        q: Queries, [B, H, S, K].
        k: Keys, [B, G, T, K].
        v: Values, [B, G, T, K].
        mask: Which key each query may see, bool [B or 1, 1, S, T]; None: as `causal` says.
        causal: Each query sees the keys up to its own place, without a mask and with S = T only; else it sees all.

    Returns:
        Weighted values, [B, H, S, K]; log-sum-exps of the scaled scores, [B, H, S], in float32 or float64.
    """
    bias = None if mask is None else _bias(mask, q)
    if q.device.type == "cpu":
        out, lse = _CPU(q, k, v, 0.0, causal, attn_mask=bias)
        return out, lse
    if _takes_flash(q, mask):
        out, lse, *_ = _FLASH(q, k, v, 0.0, causal)
        return out, lse
    out, lse, *_ = _EFFICIENT(q, _repeated(k, q), _repeated(v, q), bias, True, 0.0, causal)
    return out, lse.narrow(2, 0, q.shape[2])


def attend_backward(
    grad: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, *, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys contribute to the gradients, where `out` and `lse` are those over all keys.

    Args:
        grad: Gradient of the weighted values, [B, H, S, K].
        qkv: Queries, keys and values, as `attend` takes them.
        out: Weighted values over all keys, [B, H, S, K].
        lse: Their log-sum-exps, [B, H, S].
        mask: See `attend`.
        causal: See `attend`.

    Returns:
        Gradients of queries, keys and values.

    Source: Dao et al. 2022, "FlashAttention", appendix B.2: probabilities follow from scores and log-sum-exp alone.
    """
    q, k, v = qkv
    bias = None if mask is None else _bias(mask, q)
    if q.device.type == "cpu":
        return _CPU_BACKWARD(grad, q, k, v, out, lse.contiguous(), 0.0, causal, attn_mask=bias)
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # the state of a dropout that there is not
    if _takes_flash(q, mask):
        lengths = q.shape[2], k.shape[2]
        flash: tuple[Tensor, Tensor, Tensor] = _FLASH_BACKWARD(
            grad, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, unused, unused
        )
        return flash
    missing = lse.new_full((*lse.shape[:2], -q.shape[2] % _LSE_ALIGNMENT), torch.inf)
    lse = torch.cat([lse, missing], dim=2)
    seed, offset = unused.unbind()
    grad_q, grad_k, grad_v, _ = _EFFICIENT_BACKWARD(
        grad, q, _repeated(k, q), _repeated(v, q), bias, out, lse, seed, offset, 0.0, [True, True, True, False], causal
    )
    return grad_q, *(each.unflatten(1, (k.shape[1], -1)).sum(2) for each in (grad_k, grad_v))


def _takes_flash(q: Tensor, mask: Tensor | None) -> bool:
    return mask is None and q.dtype in (torch.bfloat16, torch.float16)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values once for each query head: the efficient kernel knows no groups."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _bias(mask: Tensor, q: Tensor) -> Tensor:
    """What is added to scores. Not infinity, of which a row with nothing to see would make NaN."""
    hidden = torch.finfo(q.dtype).min / 2
    if q.device.type == "cpu":
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, hidden)
    num_keys = mask.shape[-1]
    row = num_keys + -num_keys % _BIAS_ALIGNMENT
    bias = mask.new_zeros((*mask.shape[:-1], row), dtype=q.dtype).narrow(-1, 0, num_keys)
    return bias.masked_fill_(mask.logical_not(), hidden).expand(q.shape[0], q.shape[1], -1, -1)
