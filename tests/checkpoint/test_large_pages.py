"""The hint for large pages stays within a tensor's memory."""

from unittest.mock import Mock, patch

import pytest
import torch

from checkpoint import large_pages
from checkpoint.large_pages import LARGE_PAGE_BYTES, use_large_pages


@pytest.mark.parametrize("num_bytes", [0, LARGE_PAGE_BYTES - 1, LARGE_PAGE_BYTES, 3 * LARGE_PAGE_BYTES, 10_000_000])
@pytest.mark.parametrize("offset", [0, 64, 4096])
def test_only_whole_large_pages_within_a_tensor_are_asked_for(num_bytes: int, offset: int) -> None:
    tensor = torch.zeros(num_bytes + offset, dtype=torch.uint8)[offset:]
    libc = Mock()
    with patch.object(large_pages, "_LIBC", libc):
        use_large_pages(tensor)
    for start, length, _ in (call.args for call in libc.madvise.call_args_list):
        assert start.value % LARGE_PAGE_BYTES == 0 and length.value % LARGE_PAGE_BYTES == 0
        assert tensor.data_ptr() <= start.value < start.value + length.value <= tensor.data_ptr() + num_bytes
    # Two large pages and more hold a whole one, wherever they begin.
    assert libc.madvise.called or num_bytes < 2 * LARGE_PAGE_BYTES


def test_the_hint_changes_no_values() -> None:
    tensor = torch.arange(2 * LARGE_PAGE_BYTES, dtype=torch.int64)
    use_large_pages(tensor)
    assert torch.equal(tensor, torch.arange(2 * LARGE_PAGE_BYTES, dtype=torch.int64))
