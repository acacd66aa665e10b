"""A manifest is not trusted."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from checkpoint import load, read_manifest, save, verify
from tests.checkpoint import folders, states

EMBED = "model.embed.weight"
FILE = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("run"), states.fill(states.new_state()))


def rename_file(manifest: Any, name: str) -> None:
    manifest["files"] = {name: manifest["files"][FILE]}


def cut(manifest: Any, **changes: Any) -> None:
    manifest["tensors"][EMBED].update(changes)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a path out of the folder": (lambda m: rename_file(m, "../x"), r"lists the file '\.\./x'"),
    "an absolute path": (lambda m: rename_file(m, "/etc/passwd"), "lists the file '/etc/passwd'"),
    "a path below a name": (lambda m: rename_file(m, f"{FILE}/../../x"), "lists the file"),
    "two names of one file": (lambda m: rename_file(m, "rank-000000.safetensors"), "lists the file"),
    "a file of no rank": (lambda m: rename_file(m, "rank-00001.safetensors"), "lists the file 'rank-00001"),
    "no file": (lambda m: m.update(files={}), "describes tensors of .* bytes, more than the 0 of all data files"),
    "a file of a size that overflows": (lambda m: m["files"][FILE].update(bytes=1 << 64), "63 bits"),
    "a file that no disk holds": (lambda m: m["files"][FILE].update(bytes=1 << 60), "that is no data file"),
    "a digest that is none": (lambda m: m["files"][FILE].update(digest="../.."), "that is no data file"),
    "another format": (lambda m: m.update(format="zip"), "is not a meshwright checkpoint"),
    "another version": (lambda m: m.update(version=1), "format version 1; this release reads 2"),
    "no blocks": (lambda m: m.update(block_bytes=0), "has blocks of 0 bytes"),
    "huge blocks": (lambda m: m.update(block_bytes=1 << 40), "has blocks of 1099511627776 bytes"),
    "no header": (lambda m: m.pop("header"), "'header' must be a JSON object"),
    "a negative step": (lambda m: m["header"].update(step=-1), "'step' must hold integers from 0"),
    "a step that is true": (lambda m: m["header"].update(step=True), "'step' must be of type int"),
    "no ranks": (lambda m: m["header"].update(world_size=0), "world_size=0 must be from 1"),
    "more ranks than there are": (lambda m: m["header"].update(world_size=1 << 62), "must be from 1 to"),
    "a huge size": (lambda m: cut(m, shape=[1 << 62, 6]), "larger than any tensor"),
    "a size that overflows": (lambda m: cut(m, shape=[1 << 64, 6]), "63 bits"),
    "a product that overflows": (lambda m: cut(m, shape=[1 << 32, 1 << 32]), "larger than any tensor"),
    "a huge size beside none": (lambda m: cut(m, shape=[0, 1 << 62]), "larger than any tensor"),
    "more values than bytes": (lambda m: cut(m, shape=[1 << 20, 6]), "describes tensors of .* bytes, more than the"),
    "a thousand dims": (lambda m: cut(m, shape=[1] * 1000), "larger than any tensor"),
    "a negative size": (lambda m: cut(m, shape=[-11, -6]), "must hold integers from 0"),
    "a foreign dtype": (lambda m: cut(m, dtype="complex64"), "has dtype 'complex64'; legal: "),
    "a mesh that is not there": (lambda m: cut(m, mesh=7), "lies on mesh 7, but there are 1"),
    "a mesh of other ranks": (lambda m: m.update(meshes=[{"ranks": 2}]), r"the mesh \{'ranks': 2\} must hold 1 ranks"),
    "a mesh without ranks": (lambda m: m.update(meshes=[{"ranks": 0}]), r"the mesh \{'ranks': 0\} must hold 1 ranks"),
    "a mesh that is no object": (lambda m: m.update(meshes=[3]), "'mesh' must be of type dict|JSON object"),
    "an unknown axis": (lambda m: cut(m, splits=[["tp", 0]]), r"is cut along \['tp'\]; each axis of \['ranks'\]"),
    "an axis that cuts twice": (lambda m: cut(m, splits=[["ranks", 0], ["ranks", 1]]), "can cut once"),
    "a dim that is not there": (lambda m: cut(m, splits=[["ranks", 2]]), "is cut where it has no dim or rank"),
    "a rank that is not there": (lambda m: cut(m, at={"ranks": 1}), "is cut where it has no dim or rank"),
    "splits that are no pairs": (lambda m: cut(m, splits=[["ranks"]]), "must hold pairs of an axis and a dim"),
    "splits that are no list": (lambda m: cut(m, splits={}), "'splits' must be of type list"),
}


def with_manifest(good: Path, folder: Path, text: str) -> Path:
    path = folders.copy(good, folder / "step-00000042")
    (path / "manifest.json").write_text(text)
    return path


@pytest.mark.parametrize("what", CHANGES)
def test_a_hostile_manifest_is_refused_before_anything_is_read(good: Path, tmp_path: Path, what: str) -> None:
    change, message = CHANGES[what]
    path = folders.rewrite(folders.copy(good, tmp_path / "step-00000042"), change)
    state = states.fill(states.new_state(), seed=9)
    with pytest.raises(ValueError, match=message) as raised:
        load(path, state)
    assert str(path / "manifest.json") in str(raised.value)
    assert states.wrong_tensors(state, seed=9) == []
    with pytest.raises(ValueError, match=message):
        verify(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": "\\ud800"}', "half a surrogate pair"),
        ('{"a": 1e999}', "1e999 is not a finite number"),
        ("[" * 100_000, "more brackets than a manifest can have"),
        ('{"a":' * 100_000, "more brackets than a manifest can have"),
        (('{"aaaaaaaaaaaaaaa":' * 9000).ljust(300_000), "nests too deeply|not valid JSON"),
        (" " * (33 << 20), "manifests of up to"),
        ("[]," * (8 << 20), "more brackets than a manifest can have"),
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


@pytest.mark.parametrize("change", ["case", "number", "space", "end", "none"])
def test_a_manifest_carries_its_own_digest(good: Path, tmp_path: Path, change: str) -> None:
    text = (good / "manifest.json").read_text()
    changes = {
        "case": text.replace("1e-08", "1E-08"),
        "number": text.replace('"num_tokens": 1000', '"num_tokens": 1001'),
        "space": text.replace('"step": 42', '"step":  42'),
        "end": text + "\n",
        "none": json.dumps({key: value for key, value in json.loads(text).items() if key != "digest"}),
    }
    assert changes[change] != text
    with pytest.raises(ValueError, match=r"does not have the digest that it ends with: bytes 0 to \d+ are damaged"):
        read_manifest(with_manifest(good, tmp_path, changes[change]))


@pytest.mark.parametrize("name", ["manifest.json", FILE, "rank-00000.digests"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.timeout(20)
def test_what_is_no_plain_file_is_refused(good: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = folders.copy(good, tmp_path / "step-00000042")
    (path / name).rename(tmp_path / "elsewhere")
    if kind == "link":
        (path / name).symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    with pytest.raises(ValueError, match=r"is not a plain file|holds no manifest"):
        load(path, states.new_state())


@pytest.mark.parametrize("name", ["optimizer.groups", "optimizer.scalars"])
def test_a_damaged_optimizer_is_refused(good: Path, tmp_path: Path, name: str) -> None:
    path = folders.copy(good, tmp_path / "step-00000042")
    folders.rewrite(path, lambda manifest: manifest["header"]["optimizer"].update({name.split(".")[1]: 3}))
    state = states.fill(states.new_state(), seed=9)
    with pytest.raises(ValueError, match=r"malformed|damaged"):
        load(path, state)
    assert states.wrong_tensors(state, seed=9) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors[EMBED].update(dtype="int32"),
        lambda tensors: tensors[EMBED].update(shape=[6, 11]),
        lambda tensors: tensors.update({"model.other.weight": tensors.pop(EMBED)}),
    ],
    ids=["dtype", "shape", "name"],
)
def test_a_manifest_that_its_files_do_not_fit_is_refused(
    good: Path, tmp_path: Path, change: Callable[[Any], None]
) -> None:
    path = folders.copy(good, tmp_path / "step-00000042")
    folders.rewrite(path, lambda manifest: change(manifest["tensors"]))
    with pytest.raises(ValueError, match="files of different checkpoints are mixed"):
        verify(path)


def test_any_tool_can_open_the_files(good: Path) -> None:
    with safe_open(good / FILE, framework="pt") as opened:
        names = set(opened.keys())
        tensor = opened.get_tensor(EMBED)
    assert names == set(read_manifest(good).tensors)
    assert torch.equal(tensor, states.value_of(EMBED, tensor, seed=0))


def test_a_manifest_comes_back_as_it_was_written(good: Path) -> None:
    manifest = read_manifest(good)
    assert type(manifest).from_text(manifest.to_text().encode(), "here") == manifest
    assert manifest.to_text() == (good / "manifest.json").read_text()
