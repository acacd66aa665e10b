"""The header of a .safetensors file, written, and read without trust in it.

Source of the format: the README of https://github.com/huggingface/safetensors, section "Format".
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from checkpoint import strict_json
from checkpoint.strict_json import Json

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtype -> its code in a header; files hold no others."""
DTYPES = {code: dtype for dtype, code in CODES.items()}

LENGTH_BYTES = 8
"""A file starts with the length of its header."""
MAX_HEADER_BYTES = 16 << 20
"""Some hundred thousand tensors; parsing takes about 30 times its size of memory at worst."""
MAX_DIMS = 64
"""As many as torch knows."""
MAX_ELEMENTS = 1 << 48
METADATA = "__metadata__"


@dataclass(frozen=True, kw_only=True)
class StoredValues:
    """Where the values of one tensor lie in a file.

    Attributes:
        dtype: One of `CODES`.
        shape: Its size per dim.
        start: Their first byte, counted from the start of the file.
        num_bytes: How many bytes they are, contiguous and in row-major order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class FileHeader:
    """A file's table of contents.

    Attributes:
        tensors: Key -> its values, in the order in which they lie; together they cover all that follows the header.
        metadata: Text that the writer added.
        num_bytes: Bytes before the first value: the length and the header itself.
    """

    tensors: Mapping[str, StoredValues]
    metadata: Mapping[str, str]
    num_bytes: int


def build_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The first bytes of a file, up to the first value.

    Args:
        tensors: Key -> dtype and shape, in the order in which the values follow; readers are fastest when wide
            dtypes come first.
        metadata: Text to add.
    """
    header: dict[str, object] = {} if metadata is None else {METADATA: dict(metadata)}
    start = 0
    for key, (dtype, shape) in tensors.items():
        end = start + prod(shape) * dtype.itemsize
        header[key] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Values start at a multiple of 8 bytes, so that they can be used where they lie.
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(descriptor: int, where: str) -> FileHeader:
    """Reads and checks the header of an open file.

    Args:
        descriptor: The file; its position is left alone.
        where: Its path, for messages.

    Raises:
        ValueError: If it is no safetensors file, or a damaged or hostile one.
        OSError: If it cannot be read.
    """
    file_bytes = os.fstat(descriptor).st_size
    length = header_length(os.pread(descriptor, LENGTH_BYTES, 0), file_bytes, where)
    return parse_header(os.pread(descriptor, length, LENGTH_BYTES), file_bytes, where)


def header_length(first: bytes, file_bytes: int, where: str) -> int:
    """Bytes of JSON that follow a file's first 8, refused before anything is read or allocated for them.

    Args:
        first: The first 8 bytes, or all of a shorter file.
        file_bytes: Size of the file.
        where: Its path, for messages.

    Raises:
        ValueError: If the file cannot hold that many, or no header is as long.
    """
    if len(first) < LENGTH_BYTES:
        raise ValueError(f"{where} has {len(first)} bytes, too few for a safetensors file; it is damaged")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise ValueError(
            f"{where} announces a header of {length} bytes, but has {file_bytes} bytes in all, and headers of up to "
            f"{MAX_HEADER_BYTES} are read; it is damaged or no safetensors file"
        )
    return length


def parse_header(text: bytes, file_bytes: int, where: str) -> FileHeader:
    """Parses and checks a header.

    Args:
        text: The JSON, `header_length` bytes.
        file_bytes: Size of the file.
        where: Its path, for messages.

    Raises:
        ValueError: If it is not a header, repeats a key, describes a tensor that cannot be, or tensors that overlap,
            leave bytes between them, or do not end where the file ends.
    """
    start = LENGTH_BYTES + len(text)
    root = _parse(text, where)
    metadata = _metadata(root.pop(METADATA, {}), where)
    tensors = {key: _values(value, start, f"{where}: {key!r}") for key, value in root.items()}
    # Empty ones come before what starts at the same byte.
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes))
    at = start
    for key, values in ordered:
        if values.start != at:
            what = "overlap" if values.start < at else "leave a gap"
            raise ValueError(f"{where}: the values of {key!r} start at byte {values.start}, not {at}: tensors {what}")
        at += values.num_bytes
    if at != file_bytes:
        raise ValueError(f"{where}: its tensors end at byte {at}, but it has {file_bytes} bytes; it is damaged")
    return FileHeader(tensors=dict(ordered), metadata=metadata, num_bytes=start)


def _parse(text: bytes, where: str) -> dict[str, Json]:
    # Before it is parsed, because empty lists take 30 times the memory of their text; an entry has 3 brackets in 50.
    if text.count(b"[") + text.count(b"{") > len(text) // 10 + 8:
        raise ValueError(f"{where} holds more brackets than a safetensors header can have")
    try:
        root = strict_json.loads(text.decode(), where)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no safetensors file: its header is not UTF-8 text: {error}") from error
    if not isinstance(root, dict):
        raise ValueError(f"{where} is no safetensors file: its header is not a JSON object")
    return root


def _metadata(value: Json, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {METADATA} must be a JSON object")
    texts = {key: text for key, text in value.items() if isinstance(text, str)}
    if len(texts) < len(value):
        raise ValueError(f"{where}: {METADATA} must hold text alone")
    return texts


def _values(value: Json, data_start: int, where: str) -> StoredValues:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} must have dtype, shape and data_offsets, and nothing else")
    code = value["dtype"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{where} has the dtype {str(code)[:20]!r}; legal: {', '.join(DTYPES)}")
    shape = _counts(value["shape"], f"{where}: shape")
    offsets = _counts(value["data_offsets"], f"{where}: data_offsets")
    num_bytes = prod(shape) * DTYPES[code].itemsize
    # Without zeros: an empty tensor's other sizes must be possible too.
    if prod(size for size in shape if size) > MAX_ELEMENTS:
        raise ValueError(f"{where} has the shape {list(shape)}, which no tensor can have")
    if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
        raise ValueError(
            f"{where} lies at {list(offsets)[:4]}, but {code} of shape {list(shape)} takes {num_bytes} bytes"
        )
    return StoredValues(dtype=DTYPES[code], shape=shape, start=data_start + offsets[0], num_bytes=num_bytes)


def _counts(value: Json, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        raise ValueError(f"{where} must be a list of at most {MAX_DIMS} numbers")
    counts = tuple(each for each in value if type(each) is int and 0 <= each < 1 << 63)
    if len(counts) < len(value):
        raise ValueError(f"{where} must hold integers from 0 to below 2**63")
    return counts
