"""What is read past the page cache is what the file holds, and is checked like all else."""

import os
from pathlib import Path

import pytest

from checkpoint import ShardReader, uncached
from checkpoint.reader import Slice
from checkpoint.uncached import OpenFile, Pages
from tests.checkpoint import folders

SIZE = 3 * 4096 + 17


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(uncached, "MIN_BYTES", 0)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


def evict(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def needs_uncached_reads(path: Path) -> None:
    evict(path)
    with OpenFile(os.open(path, os.O_RDONLY)) as file:
        if file.read(0, 1, Pages(1)) is None:
            pytest.skip("this file system has no reads past the page cache, or the system does not tell what is in it")


def test_any_stretch_of_a_file_that_is_not_in_the_page_cache_comes_as_it_is(path: Path) -> None:
    needs_uncached_reads(path)
    content, pages = path.read_bytes(), Pages(SIZE)
    for start, stop in ((0, SIZE), (1, 2), (4096, 8192), (4095, 8193), (SIZE - 1, SIZE), (12_000, SIZE)):
        evict(path)
        with OpenFile(os.open(path, os.O_RDONLY)) as file:
            found = file.read(start, stop, pages)
            assert found is not None and bytes(found) == content[start:stop]
            assert file.read(start, stop, None) is None


def test_what_is_in_the_page_cache_is_left_to_a_plain_read(path: Path) -> None:
    needs_uncached_reads(path)
    path.read_bytes()
    with OpenFile(os.open(path, os.O_RDONLY)) as file:
        assert file.read(0, SIZE, Pages(SIZE)) is None


def test_a_file_that_ends_too_early_is_left_to_a_plain_read_which_says_so(path: Path) -> None:
    needs_uncached_reads(path)
    evict(path)
    with OpenFile(os.open(path, os.O_RDONLY)) as file:
        assert file.read(SIZE - 1, SIZE + 1, Pages(2)) is None


@pytest.mark.parametrize("why", ["no such reads", "no such call"])
def test_where_a_system_has_no_such_reads_they_are_plain_ones(
    path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    evict(path)
    if why == "no such reads":
        monkeypatch.delattr(os, "O_DIRECT")
    else:
        monkeypatch.setattr(uncached, "_CACHESTAT", 100_000)
    with OpenFile(os.open(path, os.O_RDONLY)) as file:
        assert file.read(0, SIZE, Pages(SIZE)) is None


def test_slices_come_back_past_the_page_cache_and_damage_is_found(path: Path, tmp_path: Path) -> None:
    needs_uncached_reads(path)
    checkpoint = folders.write_folder(tmp_path / "step-00000042")
    whole = folders.values()
    for rank_file in checkpoint.glob("*.safetensors"):
        evict(rank_file)
    reader = ShardReader(checkpoint)
    found = {name: each.new_empty(each.shape) for name, each in whole.items()}
    reader.prepare([Slice(name, (0,) * out.dim(), out) for name, out in found.items()]).run(shared=False)
    assert all(found[name].equal(each) for name, each in whole.items())
    damaged = checkpoint / "rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    evict(damaged)
    with pytest.raises(ValueError, match=r"rank-00000.safetensors is damaged: bytes"):
        reader.prepare([Slice(name, (0,) * out.dim(), out) for name, out in found.items()]).run(shared=False)
