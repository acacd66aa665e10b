"""A data file holds the values in any chunks, whatever the file system can do."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from checkpoint import filesystem, shard_file
from checkpoint.shard_file import Entries

PAGE = 4096


def tensors(num_bytes: int) -> dict[str, Tensor]:
    """Values of a total size, some of them not contiguous."""
    generator = torch.Generator().manual_seed(num_bytes)
    wide = torch.randn(64, 32, generator=generator)
    fixed = {"wide": wide, "columns": wide.t(), "part": wide[:, 3:7], "scalar": torch.tensor(3.0)}
    left = num_bytes - sum(each.nbytes for each in fixed.values())
    return fixed | {"bytes": torch.randint(0, 255, (left,), dtype=torch.uint8, generator=generator)}


def write(path: Path, values: dict[str, Tensor], block_bytes: int = 64) -> None:
    entries: Entries = {key: (each.dtype, tuple(each.shape)) for key, each in values.items()}
    stored = shard_file.write(path, entries, ((each,) for each in values.values()), block_bytes)
    content, table = path.read_bytes(), path.with_suffix(".digests").read_bytes()
    assert stored.num_bytes == len(content)
    assert stored.digest == xxhash.xxh3_64_hexdigest(table)
    blocks = [content[start : start + block_bytes] for start in range(0, len(content), block_bytes)]
    assert table == b"".join(xxhash.xxh3_64_intdigest(each).to_bytes(8, "little") for each in blocks)


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    with patch.object(shard_file, "CHUNK_BYTES", 2 * PAGE):
        yield


@pytest.mark.parametrize("block_bytes", [1, 48, 64, 3 * PAGE])
@pytest.mark.parametrize("num_bytes", [7 * PAGE, 9 * PAGE + 1, 16 * PAGE - 1])
def test_any_number_of_bytes_in_any_blocks(tmp_path: Path, num_bytes: int, block_bytes: int) -> None:
    values = tensors(num_bytes)
    write(tmp_path / "rank-00000.safetensors", values, block_bytes)
    found = load_file(tmp_path / "rank-00000.safetensors")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[key], each) for key, each in values.items())


@pytest.mark.parametrize("how", ["at once", "at the first write"])
def test_a_file_system_without_direct_writes_takes_them_through_its_cache(tmp_path: Path, how: str) -> None:
    write_at, state = filesystem.write_at, {"direct": False}

    def refuse_direct(descriptor: int, on: bool) -> bool:
        state["direct"] = on and how == "at the first write"
        return state["direct"] == on

    def refuse_write(descriptor: int, view: memoryview, offset: int) -> None:
        if state["direct"]:
            raise OSError(errno.EINVAL, "Invalid argument")
        write_at(descriptor, view, offset)

    values = tensors(9 * PAGE + 1)
    with patch.object(filesystem, "set_direct", refuse_direct), patch.object(filesystem, "write_at", refuse_write):
        write(tmp_path / "rank-00000.safetensors", values)
    found = load_file(tmp_path / "rank-00000.safetensors")
    assert all(torch.equal(found[key], each) for key, each in values.items())


def test_an_error_of_one_thread_ends_the_others(tmp_path: Path) -> None:
    calls = []

    def full(descriptor: int, view: Any, offset: int) -> None:
        calls.append(offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with patch.object(filesystem, "write_at", full), pytest.raises(OSError, match="No space left"):
        write(tmp_path / "rank-00000.safetensors", tensors(200 * PAGE))
    assert len(calls) <= shard_file.NUM_THREADS
    assert "rank-00000.digests" not in os.listdir(tmp_path)


def test_values_that_are_not_as_announced_are_refused(tmp_path: Path) -> None:
    entries: Entries = {"x": (torch.float32, (4, 2))}
    for number, rows in enumerate(([torch.zeros(3, 2)], [torch.zeros(5, 2)], [torch.zeros(4, 2).double()], [])):
        with pytest.raises(ValueError, match=r"x was announced as torch\.float32 \[4, 2\], but its values are others"):
            shard_file.write(tmp_path / f"rank-0000{number}.safetensors", entries, [rows], 64)
    shard_file.write(tmp_path / "rank-00009.safetensors", entries, [[torch.zeros(1, 2), torch.zeros(3, 2)]], 64)
