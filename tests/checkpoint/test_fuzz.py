"""Neither reader is led astray: whatever bytes it gets, it refuses them in words or returns what they say."""

import copy
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint import ShardReader
from checkpoint.manifest import Manifest, sign
from checkpoint.owners import Owners
from checkpoint.safetensors_header import header_length, parse_header
from tests.checkpoint import folders

MAX_SECONDS = 2.0
"""For one input."""
MAX_MORE_BYTES = 256 << 20
"""Memory that all inputs together may add."""

KEYS = ["x", "mesh", "splits", "at", "..", "data_offsets", "shape", "__metadata__", "ü", ""]
ODD: list[Any] = [0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**30, 1e308, True, None, "", "../x", "/etc/passwd", [[]]]
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(ODD),
    st.integers(-3, 50),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(max_size=5)),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
        max_leaves=8,
    ),
)
TOKENS = [b"[", b"{", b'"', b"9" * 40, b"-", b"1e999", b"NaN", b"\\u0000", b"\\ud800", b",", b"\xff", b"\0" * 8]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_folder(tmp_path_factory.mktemp("run") / "step-00000042")


def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """A valid input with bits flipped, stretches gone or repeated, odd ones put in, or the end cut off."""
    result = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(result))), draw(st.integers(1, 30))
        kind = draw(st.sampled_from(["flip", "remove", "repeat", "insert", "cut"]))
        if kind == "flip" and at < len(result):
            result[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "remove":
            del result[at : at + length]
        elif kind == "repeat":
            result[at:at] = result[at : at + length] * draw(st.integers(1, 50))
        elif kind == "insert":
            result[at:at] = draw(st.sampled_from(TOKENS))
        else:
            del result[at:]
    return bytes(result)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in JSON with every key of it."""
    found = []
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            found += places(value[key])
    return found


def changed_json(draw: st.DrawFn, text: bytes) -> Any:
    """A valid document with fields that say something else, stand elsewhere, have other names, or are gone."""
    document = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        found = places(document)
        if not found:
            break
        container, key = found[draw(st.integers(0, len(found) - 1))]
        kind = draw(st.sampled_from(["value", "value", "other place", "name", "gone"]))
        if kind == "value":
            # A copy: the containers among them may be changed next, or be put into themselves.
            container[key] = copy.deepcopy(draw(VALUES))
        elif kind == "other place":
            other, of = found[draw(st.integers(0, len(found) - 1))]
            container[key] = copy.deepcopy(other[of])
        elif isinstance(container, dict):
            value = container.pop(key)
            if kind == "name":
                container[draw(st.sampled_from(KEYS))] = value
    return document


@st.composite
def manifests(draw: st.DrawFn, text: bytes) -> bytes:
    """Manifests, most of them with the right digest, without which nothing gets past the first check."""
    kind = draw(st.sampled_from(["fields", "fields", "fields", "bytes", "noise"]))
    if kind == "fields":
        document = changed_json(draw, text)
        document.pop("digest", None)
        return sign(document).encode()
    return changed_bytes(draw, text) if kind == "bytes" else draw(st.binary(max_size=200))


@st.composite
def safetensors_files(draw: st.DrawFn, content: bytes) -> bytes:
    """Files, most of them with a header of the right length."""
    kind = draw(st.sampled_from(["fields", "fields", "header", "bytes", "noise"]))
    length = int.from_bytes(content[:8], "little")
    if kind in ("bytes", "noise"):
        return changed_bytes(draw, content) if kind == "bytes" else draw(st.binary(max_size=200))
    header = content[8 : 8 + length]
    text = json.dumps(changed_json(draw, header)).encode() if kind == "fields" else changed_bytes(draw, header)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def use_manifest(text: bytes) -> None:
    manifest = Manifest.from_text(text, "here")
    owners = Owners(manifest.tensors)
    for rank in range(min(manifest.header.world_size, 4)):
        owners.of_rank(rank)
    assert Manifest.from_text(manifest.to_text().encode(), "here") == manifest


def use_file(content: bytes) -> None:
    length = header_length(content[:8], len(content), "here")
    header = parse_header(content[8 : 8 + length], len(content), "here")
    assert header.num_bytes + sum(values.num_bytes for values in header.tensors.values()) == len(content)


class Inputs:
    """Counts what becomes of inputs, and holds each to its limit of time and all of them to that of memory."""

    def __init__(self, use: Callable[[Any], None]) -> None:
        self.use, self.outcomes = use, Counter[str]()
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def __call__(self, content: Any) -> None:
        start_s = time.process_time()
        try:
            self.use(content)
            self.outcomes["accepted"] += 1
        except ValueError as error:
            self.outcomes["refused"] += 1
            assert str(error)
        assert time.process_time() - start_s < MAX_SECONDS

    def check(self, count: int, accepted: float) -> None:
        assert self.outcomes.total() >= count
        assert self.outcomes["refused"] > 0.1 * count
        # Otherwise all of it would have stopped at the first check.
        assert self.outcomes["accepted"] >= accepted * count
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before) * 1024 < MAX_MORE_BYTES


def fuzz(strategy: st.SearchStrategy[Any], use: Callable[[Any], None], count: int, accepted: float = 0.02) -> None:
    """Feeds a number of inputs, the same at each run, of which some share at least is well-formed."""
    inputs = Inputs(use)

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def feed(content: Any) -> None:
        inputs(content)

    feed()
    inputs.check(count, accepted)


def fuzz_folder(good: Path, path: Path, count: int) -> None:
    """Whole folders: one file of it changed, and the manifest signed anew where that is the one."""
    folders.copy(good, path)

    @st.composite
    def changes(draw: st.DrawFn) -> tuple[str, bytes]:
        name = draw(st.sampled_from(sorted(os.listdir(good))))
        content = (good / name).read_bytes()
        return name, draw(manifests(content)) if name == "manifest.json" else changed_bytes(draw, content)

    def read_all(change: tuple[str, bytes]) -> None:
        name, content = change
        (path / name).write_bytes(content)
        try:
            reader = ShardReader(path)
            for tensor, stored in reader.manifest.tensors.items():
                if stored.num_bytes < 1 << 20:
                    reader.read(tensor)
        finally:
            (path / name).write_bytes((good / name).read_bytes())

    fuzz(changes(), read_all, count, accepted=0)


def fuzz_all(good: Path, path: Path, each: int, num_folders: int) -> None:
    fuzz(manifests((good / "manifest.json").read_bytes()), use_manifest, each)
    fuzz(safetensors_files((good / "rank-00000.safetensors").read_bytes()), use_file, each)
    fuzz_folder(good, path, num_folders)


def test_a_few_hundred_inputs_are_refused_in_words(good: Path, tmp_path: Path) -> None:
    fuzz_all(good, tmp_path / "step-00000042", 200, 50)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_thousand_inputs_are_refused_in_words(good: Path, tmp_path: Path) -> None:
    fuzz_all(good, tmp_path / "step-00000042", 10_000, 1_000)
