"""Tests of the feed-forward layer."""

import torch
import torch.nn.functional as F

from models.layers.feed_forward import FeedForward


def test_values_and_gradients_equal_swiglu_written_out() -> None:
    layer, x = FeedForward(6, 10).double(), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    written_out = layer.down_proj(F.silu(layer.gate_proj(x)) * layer.up_proj(x))
    inputs = (x, *layer.parameters())
    out, grad = layer(x), torch.randn(2, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(out, written_out, rtol=1e-14, atol=1e-14)
    ours, theirs = (torch.autograd.grad(each, inputs, grad) for each in (out, written_out))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-14)


def test_only_the_inputs_of_each_operator_are_kept() -> None:
    kept: list[int] = []
    layer, x = FeedForward(6, 10), torch.randn(2, 3, 6)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        layer(x)
    # x, gate, up and their product, beside the weights
    weights = {each.data_ptr() for each in layer.parameters()}
    assert len(set(kept) - weights) == 4
