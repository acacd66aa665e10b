"""Attention over parts of the keys adds up to attention over all of them, by the kernels' log-sum-exps."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel.attention_kernels import attend, attend_backward

B, H, G, S, T, K = 2, 4, 2, 6, 10, 8


def inputs(dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, n, h, K, dtype=dtype, device=device) for n, h in ((S, H), (T, G), (T, G)))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention as it is defined."""
    k, v = (each.repeat_interleave(H // G, 1) for each in (k, v))
    scores = (q @ k.transpose(-1, -2) / K**0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def some_mask() -> Tensor:
    """Each query sees some key; the first one sees none of the last four."""
    mask = torch.rand(B, 1, S, T, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[..., 0], mask[:, :, 0, 6:] = True, False
    return mask


@pytest.mark.parametrize("masked", [False, True])
def test_parts_of_the_keys_add_up_to_all_of_them_in_values_and_gradients(masked: bool) -> None:
    q, k, v = (each.requires_grad_() for each in inputs())
    mask = some_mask() if masked else torch.ones(B, 1, S, T, dtype=torch.bool)
    whole, lse = reference(q, k, v, mask)
    parts = [slice(0, 6), slice(6, T)]
    masks = [mask[..., part] if masked else None for part in parts]
    found = [
        attend(q.detach(), k.detach()[:, :, part], v.detach()[:, :, part], mask=each, causal=False)
        for part, each in zip(parts, masks, strict=True)
    ]
    total = torch.logaddexp(found[0][1], found[1][1])
    summed = sum(out * (each - total).exp().unsqueeze(-1) for out, each in found)
    torch.testing.assert_close(total, lse.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(summed, whole.detach(), rtol=1e-13, atol=1e-14)
    grad = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (q, k, v), grad)
    q, k, v, whole = (each.detach() for each in (q, k, v, whole))
    contributions = [
        attend_backward(grad, (q, k[:, :, part], v[:, :, part]), whole, total, mask=each, causal=False)
        for part, each in zip(parts, masks, strict=True)
    ]
    grads = [contributions[0][0] + contributions[1][0]]
    grads += [torch.cat([each[number] for each in contributions], 2) for number in (1, 2)]
    for each, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(each, right, rtol=1e-12, atol=1e-13)


def test_causal_is_the_triangle() -> None:
    q, k, v = inputs()
    out, lse = attend(q, k[:, :, :S], v[:, :, :S], mask=None, causal=True)
    right, right_lse = reference(q, k[:, :, :S], v[:, :, :S], torch.ones(S, S, dtype=torch.bool).tril())
    torch.testing.assert_close(out, right, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse, right_lse, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernels_of_a_gpu_take_these_arguments_and_give_these_shapes(masked: bool, dtype: torch.dtype) -> None:
    """Nothing is computed: what torch says of the shapes of its GPU kernels is asked on any machine."""
    with FakeTensorMode():
        q, k, v = inputs(dtype, "cuda")
        mask = torch.ones(B, 1, S, T, dtype=torch.bool, device="cuda") if masked else None
        out, lse = attend(q, k, v, mask=mask, causal=False)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
        grads = attend_backward(torch.empty_like(out), (q, k, v), out, lse, mask=mask, causal=False)
        assert [each.shape for each in grads] == [q.shape, k.shape, v.shape]
