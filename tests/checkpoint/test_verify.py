"""Damage is found where it is, and never loaded."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint import ShardReader, latest, load, read_manifest, save, verify
from checkpoint.safetensors_header import read_header
from tests.checkpoint import folders, states

SEED = 20_260


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_folder(tmp_path_factory.mktemp("run") / "step-00000042")


def tensors_at(path: Path, byte: int) -> list[str]:
    """Names of the tensors of a data file in the block of 32 bytes that holds a byte; none for the header."""
    with open(path, "rb") as file:
        header = read_header(file.fileno(), str(path))
    start = byte // 32 * 32
    return [
        key
        for key, values in header.tensors.items()
        if values.start < start + 32 and start < values.start + values.num_bytes
    ]


def check_flips(good: Path, path: Path, count: int) -> None:
    """Flips one bit at a time; verify names it, and a read gives the right values or refuses."""
    generator = random.Random(SEED)
    folders.copy(good, path)
    names = sorted(os.listdir(good))
    sizes = [(good / name).stat().st_size for name in names]
    whole = folders.values()
    for _ in range(count):
        (name,) = generator.choices(names, sizes)
        content = bytearray((good / name).read_bytes())
        byte = generator.randrange(len(content))
        content[byte] ^= 1 << generator.randrange(8)
        (path / name).write_bytes(content)
        with pytest.raises(ValueError) as raised:
            verify(path)
        message = str(raised.value)
        stem = name.split(".")[0]
        assert stem in message, (name, byte)
        if name.endswith(".safetensors"):
            start = byte // 32 * 32
            assert f"bytes {start} to " in message or "bytes 0 to" in message
            touched = tensors_at(good / name, byte)
            assert not touched or any(repr(key) in message for key in touched) or "header" in message
        check_loads(path, whole)
        (path / name).write_bytes((good / name).read_bytes())
    verify(path)


def check_loads(path: Path, whole: dict[str, torch.Tensor]) -> None:
    """Every tensor that can be read has its values."""
    try:
        reader = ShardReader(path)
    except ValueError:
        return
    refused = 0
    for name, values in whole.items():
        try:
            assert torch.equal(reader.read(name), values)
        except ValueError:
            refused += 1
    assert refused


def test_a_flipped_bit_is_found_and_never_loaded(good: Path, tmp_path: Path) -> None:
    check_flips(good, tmp_path / "step-00000042", 150)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_flipped_bits_are_found_and_never_loaded(good: Path, tmp_path: Path) -> None:
    check_flips(good, tmp_path / "step-00000042", 10_000)


def test_every_truncation_is_found(good: Path, tmp_path: Path) -> None:
    path = folders.copy(good, tmp_path / "step-00000042")
    for name in sorted(os.listdir(good)):
        content = (good / name).read_bytes()
        for size in {0, 1, 7, 8, len(content) // 2, len(content) - 1}:
            (path / name).write_bytes(content[:size])
            with pytest.raises(ValueError, match=name.split(".")[0]):
                verify(path)
            check_loads(path, folders.values())
        (path / name).write_bytes(content + b"\0")
        with pytest.raises(ValueError, match=name.split(".")[0]):
            verify(path)
        os.unlink(path / name)
        with pytest.raises(ValueError, match=name.split(".")[0]):
            verify(path)
        (path / name).write_bytes(content)
    verify(path)


def swapped(path: Path, suffixes: tuple[str, ...]) -> None:
    for suffix in suffixes:
        first, second, spare = (path / f"{stem}.{suffix}" for stem in ("rank-00000", "rank-00001", "spare"))
        first.rename(spare)
        second.rename(first)
        spare.rename(second)


def mixed(path: Path, suffixes: tuple[str, ...]) -> None:
    """Files of a later step, of the same sizes."""
    other = {name: values.clone() for name, values in folders.values().items()}
    other["embed"] += 1
    later = folders.write_folder(path.parent / "step-00000043", other, step=43)
    for suffix in suffixes:
        shutil.copy(later / f"rank-00001.{suffix}", path / f"rank-00001.{suffix}")
    shutil.rmtree(later)


@pytest.mark.parametrize("exchange", [swapped, mixed])
@pytest.mark.parametrize("suffixes", [("safetensors",), ("digests",), ("safetensors", "digests")])
def test_files_of_other_ranks_and_steps_are_found(
    good: Path, tmp_path: Path, exchange: Callable[[Path, tuple[str, ...]], None], suffixes: tuple[str, ...]
) -> None:
    path = folders.copy(good, tmp_path / "step-00000042")
    exchange(path, suffixes)
    with pytest.raises(ValueError, match=r"rank-0000[01]"):
        verify(path)
    check_loads(path, folders.values())


def test_a_manifest_of_another_step_is_found(good: Path, tmp_path: Path) -> None:
    path = folders.copy(good, tmp_path / "step-00000042")
    other = {name: values.clone() for name, values in folders.values().items()}
    other["embed"] += 1
    later = folders.write_folder(tmp_path / "later", other)
    shutil.copy(later / "manifest.json", path)
    with pytest.raises(ValueError, match=r"rank-00000\.digests is damaged or of another checkpoint"):
        verify(path)


def test_a_file_that_no_manifest_lists_is_named(good: Path, tmp_path: Path) -> None:
    path = folders.copy(good, tmp_path / "step-00000042")
    shutil.copy(path / "rank-00000.safetensors", path / "rank-00008.safetensors")
    with pytest.raises(ValueError, match=r"rank-00008\.safetensors is not one of the manifest's files"):
        verify(path)


def test_all_damage_is_listed(good: Path, tmp_path: Path) -> None:
    path = folders.copy(good, tmp_path / "step-00000042")
    for stem in ("rank-00002", "rank-00003"):
        content = bytearray((path / f"{stem}.safetensors").read_bytes())
        content[-1] ^= 1
        (path / f"{stem}.safetensors").write_bytes(content)
    with pytest.raises(ValueError) as raised:
        verify(path)
    assert sum("is damaged: bytes" in line for line in str(raised.value).splitlines()) == 2


def test_a_training_state_is_refused_with_file_tensor_and_bytes(tmp_path: Path) -> None:
    path = save(tmp_path, states.fill(states.new_state()))
    file = path / "rank-00000.safetensors"
    with open(file, "rb") as opened:
        values = read_header(opened.fileno(), str(file)).tensors["model.embed.weight"]
    content = bytearray(file.read_bytes())
    content[values.start] ^= 64
    file.write_bytes(content)
    message = r"rank-00000\.safetensors is damaged: bytes \d+ to \d+, of .*'model\..*; delete the damaged folder"
    with pytest.raises(ValueError, match=message):
        load(path, states.new_state())
    with pytest.raises(ValueError, match=message):
        verify(path)


def test_a_whole_checkpoint_verifies(tmp_path: Path) -> None:
    path = save(tmp_path, states.fill(states.new_state()))
    assert verify(path) == read_manifest(path)
    assert latest(tmp_path) == path
