"""A manifest is not trusted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from checkpoint import load, read_manifest, save
from checkpoint.coverage import check_coverage
from tests.checkpoint import states

EMBED = "model.embed.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("run"), states.fill(states.new_state()))


def chunk_of(manifest: Any) -> Any:
    return manifest["tensors"][EMBED]["chunks"][0]


def rename_file(manifest: Any, name: str) -> None:
    (old,) = manifest["files"]
    manifest["files"] = {name: manifest["files"][old]}
    for tensor in manifest["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["file"] = name


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a path out of the folder": (lambda m: rename_file(m, "../x"), r"lists the file '\.\./x'"),
    "an absolute path": (lambda m: rename_file(m, "/etc/passwd"), "lists the file '/etc/passwd'"),
    "a path below a name": (lambda m: rename_file(m, "rank-00000.safetensors/../../x"), "lists the file"),
    "a file that is not listed": (lambda m: chunk_of(m).update(file="rank-00009.safetensors"), "not one of"),
    "another format": (lambda m: m.update(format="zip"), "is not a meshwright checkpoint"),
    "a later version": (lambda m: m.update(version=2), "format version 2; this release reads 1"),
    "no header": (lambda m: m.pop("header"), "'header' must be a JSON object"),
    "a negative step": (lambda m: m["header"].update(step=-1), "'step' must hold integers from 0"),
    "a step that is true": (lambda m: m["header"].update(step=True), "'step' must be of type int"),
    "a huge size": (lambda m: m["tensors"][EMBED].update(shape=[1 << 62, 6]), "more than all data files hold"),
    "a size that overflows": (lambda m: m["tensors"][EMBED].update(shape=[1 << 64, 6]), "63 bits"),
    "a foreign dtype": (lambda m: m["tensors"][EMBED].update(dtype="complex64"), "has dtype 'complex64'; legal: "),
    "a chunk outside": (lambda m: chunk_of(m).update(offsets=[1, 0]), r"chunk of sizes \[11, 6\] at \[1, 0\]"),
    "a chunk of other dims": (lambda m: chunk_of(m).update(sizes=[66]), "is not within"),
    "a hole": (lambda m: chunk_of(m).update(sizes=[10, 6]), "chunks hold 60 elements"),
    "no chunk": (lambda m: chunk_of(m) and m["tensors"][EMBED].update(chunks=[]), "chunks hold 0 elements"),
    "chunks that are no list": (lambda m: m["tensors"][EMBED].update(chunks={}), "'chunks' must be of type list"),
}


def with_manifest(good: Path, folder: Path, text: str) -> Path:
    path = folder / "step-00000042"
    path.mkdir()
    for file in good.glob("*.safetensors"):
        (path / file.name).write_bytes(file.read_bytes())
    (path / "manifest.json").write_text(text)
    return path


@pytest.mark.parametrize("what", CHANGES)
def test_a_hostile_manifest_is_refused_before_anything_is_read(good: Path, tmp_path: Path, what: str) -> None:
    change, message = CHANGES[what]
    manifest = json.loads((good / "manifest.json").read_text())
    change(manifest)
    path = with_manifest(good, tmp_path, json.dumps(manifest))
    state = states.fill(states.new_state(), seed=9)
    with pytest.raises(ValueError, match=message) as raised:
        load(path, state)
    assert str(path / "manifest.json") in str(raised.value)
    assert states.wrong_tensors(state, seed=9) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": 1e999}', "1e999 is not a finite number"),
        ("[" * 100_000, "nests too deeply"),
    ],
)
def test_text_that_is_not_strict_json_is_refused(good: Path, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_manifest(with_manifest(good, tmp_path, text))


def test_bytes_that_are_no_text_are_refused(good: Path, tmp_path: Path) -> None:
    path = with_manifest(good, tmp_path, "")
    (path / "manifest.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_manifest(path)


@pytest.mark.parametrize("name", ["optimizer.groups", "optimizer.scalars"])
def test_a_damaged_optimizer_is_refused(good: Path, tmp_path: Path, name: str) -> None:
    manifest = json.loads((good / "manifest.json").read_text())
    manifest["header"]["optimizer"][name.split(".")[1]] = 3
    state = states.fill(states.new_state(), seed=9)
    with pytest.raises(ValueError, match=r"malformed|damaged"):
        load(with_manifest(good, tmp_path, json.dumps(manifest)), state)
    assert states.wrong_tensors(state, seed=9) == []


def test_files_of_another_checkpoint_are_refused(good: Path, tmp_path: Path) -> None:
    state = states.fill(states.new_state())
    state.trained.named_parameters()["low.weight"].data = torch.zeros(5, 3, dtype=torch.bfloat16)
    state.optimizer = None
    other = save(tmp_path / "other", state)
    state.trained.named_parameters()["low.weight"].data = torch.zeros(3, 5, dtype=torch.bfloat16)
    this = save(tmp_path / "this", state)
    (other / "rank-00000.safetensors").replace(this / "rank-00000.safetensors")
    with pytest.raises(ValueError, match="files of different checkpoints are mixed"):
        load(this, state)


def test_any_tool_can_open_the_files(good: Path) -> None:
    with safe_open(good / "rank-00000.safetensors", framework="pt") as opened:
        names = set(opened.keys())
        tensor = opened.get_tensor(EMBED)
    assert names == set(read_manifest(good).tensors)
    assert torch.equal(tensor, states.value_of(EMBED, tensor, seed=0))


def test_a_manifest_comes_back_as_it_was_written(good: Path) -> None:
    manifest = read_manifest(good)
    assert type(manifest).from_text(manifest.to_text(), "here") == manifest


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (4, 3)), ((0, 3), (4, 3))], None),
        ([((0, 0), (1, 6)), ((1, 0), (3, 2)), ((1, 2), (3, 4))], None),
        ([((0, 0), (4, 3)), ((0, 2), (4, 3))], "overlap"),
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], "overlap"),
        ([((0, 0), (4, 6)), ((0, 0), (0, 6))], "is not within"),
        ([((0, 0), (4, 3)), ((0, 3), (4, 2))], "20 elements, but shape .* has 24"),
    ],
)
def test_boxes_must_tile_the_tensor(boxes: list[Any], message: str | None) -> None:
    if message is None:
        check_coverage("x", (4, 6), boxes)
    else:
        with pytest.raises(ValueError, match=message):
            check_coverage("x", (4, 6), boxes)


def test_a_tiling_of_thousands_of_boxes_is_checked_fast() -> None:
    boxes = [((row, column), (1, 1)) for row in range(1000) for column in range(4)]
    check_coverage("x", (1000, 4), boxes)
    with pytest.raises(ValueError, match="overlap"):
        check_coverage("x", (1000, 4), [*boxes[:-1], boxes[0]])
