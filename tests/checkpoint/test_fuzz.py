"""Neither reader is led astray: whatever bytes it gets, it refuses them in words or returns what they say."""

import copy
import json
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint import ShardReader
from checkpoint.manifest import Manifest, sign
from checkpoint.owners import Owners
from checkpoint.safetensors_header import header_length, parse_header
from tests.checkpoint import folders

SEED = 7
MAX_SECONDS = 2.0
"""For one input."""
MAX_MORE_BYTES = 256 << 20
"""Memory that all inputs together may add."""

SPECIAL: list[Any] = [0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**30, 1e308, True, None, "", "x", "../x", [], {}, [[]]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_folder(tmp_path_factory.mktemp("run") / "step-00000042")


def mutate_bytes(generator: random.Random, content: bytes) -> bytes:
    """Flips, cuts, repeats and inserts."""
    result = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(result) + 1)
        kind = generator.randrange(5)
        if kind == 0 and at < len(result):
            result[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            del result[at : at + generator.randint(1, 30)]
        elif kind == 2:
            result[at:at] = result[at : at + generator.randint(1, 30)] * generator.randint(1, 50)
        elif kind == 3:
            result[at:at] = generator.choice([b"[", b"{", b'"', b"9" * 40, b"-", b"1e999", b"NaN", b"\\u0000", b","])
        elif result:
            del result[generator.randrange(len(result)) :]
    return bytes(result)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in JSON with every key of it."""
    found = []
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            found += places(value[key])
    return found


def mutate_json(generator: random.Random, text: bytes) -> Any:
    """Changes what well-formed JSON says."""
    document = json.loads(text)
    for _ in range(generator.randint(1, 3)):
        container, key = generator.choice(places(document) or [({}, "x")])
        kind = generator.randrange(4)
        if kind == 0:
            # A copy: the containers among them may be changed next, or be put into themselves.
            container[key] = copy.deepcopy(generator.choice(SPECIAL))
        elif kind == 1:
            container[key] = json.loads(json.dumps(generator.choice(places(document) or [({0: 1}, 0)])[0]))
        elif kind == 2 and isinstance(container, dict):
            container[generator.choice(["x", "mesh", "splits", "at", "..", "data_offsets"])] = container.pop(key, 0)
        elif isinstance(container, dict):
            container.pop(key, None)
    return document


def use_manifest(text: bytes) -> None:
    manifest = Manifest.from_text(text, "here")
    owners = Owners(manifest.tensors)
    for rank in range(min(manifest.header.world_size, 4)):
        owners.of_rank(rank)


def signed(document: Any) -> bytes:
    document.pop("digest", None)
    return sign(document).encode()


def use_header(content: bytes) -> None:
    length = header_length(content[:8], len(content), "here")
    parse_header(content[8 : 8 + length], len(content), "here")


def check_refusals(inputs: Callable[[int], bytes], use: Callable[[bytes], None], count: int) -> int:
    """Feeds inputs; returns how many were refused."""
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for number in range(count):
        content = inputs(number)
        start_s = time.process_time()
        try:
            use(content)
        except ValueError as error:
            refused += 1
            assert str(error)
        assert time.process_time() - start_s < MAX_SECONDS, content[:200]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MAX_MORE_BYTES
    return refused


def fuzz_manifest(good: Path, count: int) -> None:
    generator = random.Random(SEED)
    text = (good / "manifest.json").read_bytes()
    # Without the right digest nothing gets past the first check, so half of the inputs have it.
    check_refusals(lambda _: signed(mutate_json(generator, text)), use_manifest, count - count // 4)
    assert check_refusals(lambda _: mutate_bytes(generator, text), use_manifest, count // 4) > 0.9 * (count // 4)


def fuzz_header(good: Path, count: int) -> None:
    generator = random.Random(SEED)
    content = (good / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")

    def changed(number: int) -> bytes:
        if number % 3 == 0:
            return mutate_bytes(generator, content)
        document = mutate_json(generator, content[8 : 8 + length])
        text = json.dumps(document).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    check_refusals(changed, use_header, count)


def fuzz_folder(good: Path, path: Path, count: int) -> None:
    """Whole folders: one file of it changed, and the manifest signed anew where that is the one."""
    generator = random.Random(SEED)
    folders.copy(good, path)
    names = sorted(os.listdir(good))

    def read_all(_: bytes) -> None:
        reader = ShardReader(path)
        for name, tensor in reader.manifest.tensors.items():
            if tensor.num_bytes < 1 << 20:
                reader.read(name)

    for _ in range(count):
        name = generator.choice(names)
        content = (good / name).read_bytes()
        is_manifest = name == "manifest.json"
        changed = signed(mutate_json(generator, content)) if is_manifest else mutate_bytes(generator, content)
        (path / name).write_bytes(changed)
        check_refusals(lambda _: b"", read_all, 1)
        (path / name).write_bytes(content)


def test_a_few_hundred_inputs_are_refused_in_words(good: Path, tmp_path: Path) -> None:
    fuzz_manifest(good, 300)
    fuzz_header(good, 300)
    fuzz_folder(good, tmp_path / "step-00000042", 30)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_thousand_inputs_are_refused_in_words(good: Path, tmp_path: Path) -> None:
    fuzz_manifest(good, 10_000)
    fuzz_header(good, 10_000)
    fuzz_folder(good, tmp_path / "step-00000042", 1_000)
