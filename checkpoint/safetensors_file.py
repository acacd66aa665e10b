"""Writes one .safetensors file, tensor after tensor, without a copy of them all."""

import ctypes
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import filesystem

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
"""Dtype -> its code in a file's header; a checkpoint holds no others."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of a file.

    Attributes:
        key: Its name in the file.
        dtype: One of `CODES`.
        shape: Its size per dim.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


def write(path: Path, entries: list[Entry], tensors: Iterator[Tensor]) -> int:
    """Writes a new file and waits until the disk has it.

    Args:
        path: Where; must not exist.
        entries: What the file holds, in this order; readers are fastest when wide dtypes come first.
        tensors: Their values in the same order, on any device, each asked for when its turn comes.

    Returns:
        Size of the file in bytes.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If a tensor is not what its entry says.
    """
    file = filesystem.create(path)
    try:
        filesystem.write(file, [memoryview(_header(entries))])
        for entry, tensor in zip(entries, tensors, strict=True):
            if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
                raise ValueError(
                    f"{entry.key} was announced as {entry.dtype} {list(entry.shape)} but is "
                    f"{tensor.dtype} {list(tensor.shape)}; a state must not change while it is saved"
                )
            # A name for the copy: its memory must outlive the view of it.
            values = tensor.detach().cpu().contiguous()
            filesystem.write(file, [_bytes_of(values)])
        filesystem.sync(file)
        return os.fstat(file).st_size
    finally:
        os.close(file)


def _header(entries: list[Entry]) -> bytes:
    header: dict[str, dict[str, object]] = {}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        header[entry.key] = {"dtype": CODES[entry.dtype], "shape": entry.shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Values start at a multiple of 8 bytes, so that they can be used where they lie.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; numpy, which is no dependency, would know no bfloat16."""
    return memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B")
