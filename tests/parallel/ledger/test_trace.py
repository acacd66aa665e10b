"""The meter of memory counts each storage once, from the op that makes it until it is freed."""

import torch
from torch.utils.checkpoint import checkpoint

from parallel.ledger.trace import MemoryMeter

KIB = 256
"""Float32 elements of a KiB."""


def test_tensors_of_one_storage_count_once_until_the_last_is_gone() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    with meter:
        whole = torch.empty(4 * KIB)
        part = whole[:KIB].view(2, -1)
        assert meter.live_bytes == 4096
        del whole
        assert meter.live_bytes == 4096
        del part
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 4096


def test_memory_that_is_resized_without_an_op_counts_with_its_new_size() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    with meter:
        gathered = torch.empty(4 * KIB)
        gathered.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        gathered.untyped_storage().resize_(8192)
        assert meter.live_bytes == 8192
    resize = torch.UntypedStorage.resize_
    assert resize.__qualname__ == torch.UntypedStorage.resize_.__qualname__
    assert "MemoryMeter" not in resize.__qualname__


def test_what_autograd_alone_holds_counts_and_tensors_on_meta_do_not() -> None:
    weight = torch.ones(KIB, requires_grad=True)
    meter = MemoryMeter(torch.device("cpu"))
    with meter:
        torch.empty(4 * KIB, device="meta")
        out = weight.exp().sum()
        # The exponential is kept for backward.
        assert meter.live_bytes == 1024 + 4
        recomputed = checkpoint(torch.exp, weight, use_reentrant=False).sum()
        assert meter.live_bytes == 1024 + 4 + 4
        del out, recomputed
    assert meter.live_bytes == 0


def test_a_call_may_look_at_the_moment_of_an_op() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    seen: list[int] = []

    def run() -> None:
        first = torch.empty(KIB)
        second = torch.empty(2 * KIB)
        del first, second
        torch.empty(KIB)

    with meter:
        meter.start()
        run()
        peak, at_op = meter.peak_bytes, meter.peak_op
        meter.start(at_op=at_op, call=lambda: seen.append(meter.live_bytes))
        run()
    assert (peak, seen) == (3072, [3072])
