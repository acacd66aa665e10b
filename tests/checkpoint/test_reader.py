"""Slices of any tensor come back exactly, from as few bytes as possible."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoint import ShardReader, files, verified_file
from checkpoint.boxes import Box
from checkpoint.layout import Layout
from checkpoint.reader import Slice
from tests.checkpoint import folders
from tests.checkpoint.folders import part

KIB = 1 << 10


@pytest.fixture(scope="module", params=[1, 32, 64 * KIB])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "step-00000042"
    return folders.write_folder(folder, block_bytes=request.param)


def test_every_tensor_comes_back(path: Path) -> None:
    assert folders.wrong(path) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_slices_come_back_in_one_read(path: Path, data: st.DataObject) -> None:
    whole = folders.values()
    slices, expected = [], []
    for name in data.draw(st.lists(st.sampled_from(sorted(whole)), min_size=1, max_size=6)):
        shape = whole[name].shape
        offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
        sizes = tuple(data.draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
        # Twice as wide, so that rows of the target do not follow each other.
        is_wide = bool(sizes) and data.draw(st.sampled_from([True, False]))
        out = torch.zeros((*sizes[:-1], sizes[-1] * 2) if is_wide else sizes, dtype=whole[name].dtype)
        out = out[..., ::2] if is_wide else out
        slices.append(Slice(name, offsets, out))
        expected.append(part(whole[name], Box(offsets, sizes)))
    ShardReader(path).prepare(slices).run()
    for each, values in zip(slices, expected, strict=True):
        assert torch.equal(each.out, values)


def test_values_are_converted_to_the_dtype_of_the_target(path: Path) -> None:
    out = torch.empty(11, 6, dtype=torch.bfloat16)
    assert ShardReader(path).read("embed", out=out) is out
    assert torch.equal(out, folders.values()["embed"].bfloat16())


@pytest.mark.parametrize(
    ("name", "offsets", "sizes"),
    [("embed", (0, 0), (12, 6)), ("embed", (-1, 0), (1, 1)), ("embed", (0,), (1,)), ("nothing", (), ())],
)
def test_a_part_that_is_not_there_is_refused(
    path: Path, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"has no part of sizes|holds no tensor 'nothing'"):
        ShardReader(path).read(name, offsets, sizes)


def bytes_read(path: Path, slices: Sequence[Slice]) -> int:
    """Bytes that a read of slices takes from data files, headers and digests not counted."""
    prepared = ShardReader(path).prepare(slices)
    counts = []

    def count(descriptor: int, views: Any, offset: int) -> int:
        counts.append(preadv(descriptor, views, offset))
        return counts[-1]

    preadv = os.preadv
    with patch.object(os, "preadv", count):
        prepared.run()
    return sum(counts)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Matrices of 1 MiB among many small tensors, cut by rows over two ranks, with blocks as large as a save's."""
    tensors = {f"matrix{number}": torch.randn(512, 512) for number in range(8)}
    tensors |= {f"scalar{number}": torch.tensor(float(number)) for number in range(50)}
    rows = Layout((("fsdp", 2),), (("fsdp", 0),))
    layouts = {name: rows if tensor.dim() else Layout((("fsdp", 2),)) for name, tensor in tensors.items()}
    path = tmp_path_factory.mktemp("large") / "step-00000042"
    return folders.write_folder(path, tensors, layouts, block_bytes=16 * KIB), tensors


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_row_shards_read_hardly_more_than_they_need(large: tuple[Path, dict[str, Tensor]], degree: int) -> None:
    path, tensors = large
    slices = []
    for name, tensor in tensors.items():
        rows = tensor.chunk(degree)[-1] if tensor.dim() else tensor
        offsets = (len(tensor) - len(rows), 0) if tensor.dim() else ()
        slices.append(Slice(name, offsets, torch.empty_like(rows)))
    needed = sum(each.out.nbytes for each in slices)
    assert bytes_read(path, slices) <= 1.05 * needed
    for each in slices:
        assert torch.equal(each.out, part(tensors[each.name], each.box))


def test_column_shards_read_no_block_that_they_do_not_touch(tmp_path: Path) -> None:
    wide = torch.randn(16, 64 * KIB)
    path = folders.write_folder(
        tmp_path / "step-00000042", {"wide": wide}, {"wide": Layout((("tp", 1),))}, block_bytes=16 * KIB
    )
    half = Slice("wide", (0, 32 * KIB), torch.empty(16, 32 * KIB))
    # Rows of 256 KiB, of which 128 are needed: at most one block more on either side.
    assert bytes_read(path, [half]) <= 16 * (128 + 32) * KIB
    assert torch.equal(half.out, wide[:, 32 * KIB :])


def test_no_file_is_opened_that_holds_nothing_of_a_slice(path: Path) -> None:
    opened = []
    original = files.open_plain

    def record(file: Path) -> tuple[int, int]:
        opened.append(file.name)
        return original(file)

    with patch.object(verified_file, "open_plain", record):
        ShardReader(path).read("stage", (0, 0), (1, 2))
    assert {name.split(".")[0] for name in opened} == {"rank-00004"}
