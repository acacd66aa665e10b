"""Tests of the attention core."""

import pytest
import torch

from models.layers.attention import SdpaCore, repeat_groups


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("packed", [False, True])
def test_core_equals_softmax_written_out(num_kv_heads: int, packed: bool) -> None:
    q = torch.randn(2, 7, 6, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, 7, num_kv_heads, 4, dtype=torch.float64)
    document_ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
    core = SdpaCore()
    out = core(q, k, v, core.prepare(document_ids if packed else None))
    seen = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 7, 7)
    if packed:
        seen = seen & (document_ids[:, :, None] == document_ids[:, None, :])
    whole_k, whole_v = (repeat_groups(each, 6) for each in (k, v))
    scores = torch.einsum("bshk,bthk->bhst", q, whole_k) / 2
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("bhst,bthk->bshk", weights, whole_v), rtol=0, atol=1e-14)


def test_core_leaves_its_output_in_an_order_that_the_next_matmul_reads_without_a_copy() -> None:
    q, k, v = torch.randn(3, 2, 16, 6, 8)
    assert SdpaCore()(q, k, v, None).is_contiguous()
