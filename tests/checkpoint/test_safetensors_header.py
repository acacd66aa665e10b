"""The header of a .safetensors file, from honest writers and others."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save_file

from checkpoint.safetensors_header import (
    CODES,
    MAX_HEADER_BYTES,
    FileHeader,
    build_header,
    header_length,
    parse_header,
    read_header,
)


def parse(header: Any, data_bytes: int) -> FileHeader:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(text, 8 + len(text) + data_bytes, "a file")


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_a_header_says_where_the_values_of_a_file_by_the_safetensors_package_lie(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    with open(path, "rb") as file:
        header = read_header(file.fileno(), str(path))
        assert file.tell() == 0
    assert header.metadata == {"format": "pt"}
    assert header.tensors.keys() == tensors.keys()
    data = path.read_bytes()
    for key, values in header.tensors.items():
        assert (values.dtype, values.shape) == (tensors[key].dtype, tuple(tensors[key].shape))
        there = data[values.start : values.start + values.num_bytes]
        assert there == bytes(tensors[key].reshape(-1).view(torch.uint8).tolist())


def test_the_safetensors_package_reads_a_built_header_of_every_dtype(tmp_path: Path) -> None:
    shapes = {code: (dtype, (2, 3)) for dtype, code in CODES.items()}
    header = build_header(shapes, {"format": "pt"})
    assert len(header) % 8 == 0
    num_bytes = sum(6 * dtype.itemsize for dtype in CODES)
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + bytes(num_bytes))
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        for code, (dtype, shape) in shapes.items():
            assert opened.get_tensor(code).dtype == dtype
            assert opened.get_slice(code).get_shape() == list(shape)
    parsed = parse_header(header[8:], len(header) + num_bytes, "a file")
    assert {key: (each.dtype, each.shape) for key, each in parsed.tensors.items()} == shapes


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        (b"[]", 0, "not a JSON object"),
        (b"nonsense", 0, "not valid JSON"),
        (b'{"a": "\xff"}', 0, "not UTF-8"),
        (b'{"a":{"dtype":"I8","shape":[0],"data_offsets":[0,0]},"a":{}}' + b" " * 40, 0, "twice"),
        ({"a": []}, 24, "dtype, shape and data_offsets"),
        ({"a": entry(more=1)}, 24, "nothing else"),
        ({"a": entry(dtype="F31")}, 24, "dtype 'F31'; legal: F64"),
        ({"a": entry(dtype=["F32"])}, 24, "dtype"),
        ({"a": entry(shape=[2, -3])}, 24, "integers from 0"),
        ({"a": entry(shape=[2, 3.0])}, 24, "integers from 0"),
        ({"a": entry(shape=[2, True])}, 24, "integers from 0"),
        ({"a": entry(shape=[2, 1 << 63])}, 24, "integers from 0"),
        ({"a": entry(shape=[1] * 65)}, 24, "at most 64"),
        ({"a": entry(shape="2")}, 24, "list"),
        ({"a": entry(shape=[0, 1 << 62, 1 << 62], offsets=[0, 0])}, 0, "no tensor can have"),
        ({"a": entry(shape=[1 << 33, 1 << 33], offsets=[0, 1 << 62])}, 24, "no tensor can have"),
        ({"a": entry(offsets=[0, 20])}, 24, "takes 24 bytes"),
        ({"a": entry(offsets=[24, 0])}, 24, "takes 24 bytes"),
        ({"a": entry(offsets=[0])}, 24, "takes 24 bytes"),
        ({"a": entry(), "b": entry(offsets=[20, 44])}, 44, "'b' start at byte .* overlap"),
        ({"a": entry(), "b": entry()}, 24, "overlap"),
        ({"a": entry(), "b": entry(offsets=[28, 52])}, 52, "leave a gap"),
        ({"a": entry(offsets=[4, 28])}, 28, "leave a gap"),
        ({"a": entry()}, 25, "end at byte"),
        ({"a": entry()}, 23, "end at byte"),
        ({"__metadata__": {"a": 1}}, 0, "text alone"),
        ({"__metadata__": ["a"]}, 0, "must be a JSON object"),
        (b'{"a":' + b"[" * 100_000, 0, "brackets"),
        (b'{"a":"' + b"x" * 100_000 + b'","b":' + b"[" * 5000, 0, "nests too deeply|not valid JSON"),
        (b'{"a":' + b"9" * 10_000 + b"}", 0, "not valid JSON"),
        (b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', 4, "not a finite number"),
    ],
)
def test_a_header_that_cannot_be_is_refused_by_name(header: Any, data_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(header, data_bytes)


@pytest.mark.parametrize("first", [b"", b"\x02", (1 << 63).to_bytes(8, "little"), bytes(8), b"\xff" * 8])
def test_a_header_of_an_impossible_length_is_refused_before_it_is_read(first: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(first + b"{}"[: len(first)])
    with open(path, "rb") as file, pytest.raises(ValueError, match=r"too few|announces a header"):
        read_header(file.fileno(), str(path))


def test_a_sparse_file_of_a_terabyte_does_not_get_a_header_of_a_gigabyte_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((1 << 30).to_bytes(8, "little"))
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    with open(path, "rb") as file, pytest.raises(ValueError, match="announces a header"):
        read_header(file.fileno(), str(path))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize("filling", [b"[],", b"{},", b'"ab",', b"999,", b'[""],'])
def test_the_longest_hostile_header_takes_bounded_memory(filling: bytes) -> None:
    length = MAX_HEADER_BYTES // 8
    text = b'{"a":[' + filling * (length // len(filling)) + b"0]}"
    tracemalloc.start()
    with pytest.raises(ValueError, match="a file"):
        parse(text, 0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 30 * len(text)


HONEST = build_header({"a": (torch.float32, (2, 3)), "b.weight": (torch.bfloat16, (5,)), "c": (torch.int8, ())})


@settings(max_examples=500, deadline=None)
@given(st.data())
@example(None)
def test_what_is_accepted_of_changed_files_the_safetensors_package_reads_alike(data: Any) -> None:
    whole = bytearray(HONEST + bytes(35))
    if data is not None:
        for _ in range(data.draw(st.integers(1, 4))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        del whole[data.draw(st.integers(8, len(whole))) :]
    try:
        length = header_length(bytes(whole[:8]), len(whole), "a file")
        ours = parse_header(bytes(whole[8 : 8 + length]), len(whole), "a file")
    except ValueError:
        return
    try:
        theirs = dict(deserialize(bytes(whole)))
    except SafetensorError as error:
        # JSON of theirs is stricter in nothing that matters to where bytes lie.
        raise AssertionError(f"accepted what the package refuses: {bytes(whole)!r}") from error
    assert theirs.keys() == ours.tensors.keys()
    for key, values in ours.tensors.items():
        assert tuple(theirs[key]["shape"]) == values.shape
        assert theirs[key]["dtype"] == CODES[values.dtype]
        assert bytes(theirs[key]["data"]) == bytes(whole[values.start : values.start + values.num_bytes])
