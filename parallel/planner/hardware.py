"""Reads what GPUs and the links between them can do from a table that users can extend."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

CPU = "cpu"
"""Name of what stands for ranks on this machine's processors, of which the figures are measured on the spot."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in one kind of cluster.

    Attributes:
        name: Its name in the table.
        peak_tflops: Dense peak in TFLOP/s by dtype of the matmuls.
        memory_gib: Memory, in GiB.
        memory_gb_per_s: Bandwidth of the memory, in GB/s.
        power_w: Limit of its power, in W.
        gpus_per_node: GPUs that share the fast links.
        node_link_gb_per_s: What a GPU sends to others of its node, in GB/s.
        network_link_gb_per_s: What a GPU sends to other nodes, in GB/s.
        hop_latency_us: Time that each step of a ring takes beside its bytes, in microseconds.
        host_link_gb_per_s: What a GPU exchanges with the host's memory, in GB/s; may be left out, as PCIe 4 then.
        host_gb_per_s: What the host moves for each GPU in its own memory, in GB/s; may be left out.
        host_memory_gib: Host memory for each GPU, in GiB; may be left out. 0: there is none beside `memory_gib`, to
            which anything could be offloaded.
    """

    name: str
    peak_tflops: Mapping[str, float]
    memory_gib: float
    memory_gb_per_s: float
    power_w: float
    gpus_per_node: int
    node_link_gb_per_s: float
    network_link_gb_per_s: float
    hop_latency_us: float
    host_link_gb_per_s: float = 25.0
    host_gb_per_s: float = 25.0
    host_memory_gib: float = 128.0

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a figure is no positive number.
        """
        figures = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "name"}
        peaks = figures.pop("peak_tflops")
        if not isinstance(peaks, Mapping) or "bfloat16" not in peaks:
            raise ValueError(f"GPU {self.name!r}: peak_tflops={peaks!r} must be a table by dtype with bfloat16 in it")
        figures |= {f"peak_tflops.{dtype}": peak for dtype, peak in peaks.items()}
        for name, value in figures.items():
            if value == 0 and name == "host_memory_gib":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"GPU {self.name!r}: {name}={value!r} must be a positive number")
        if not isinstance(self.gpus_per_node, int):
            raise ValueError(f"GPU {self.name!r}: gpus_per_node={self.gpus_per_node!r} must be an integer")

    def peak(self, dtype: str) -> float:
        """Dense peak in TFLOP/s.

        Args:
            dtype: Of the matmuls.

        Raises:
            ValueError: If it is not known for the dtype.
        """
        if dtype not in self.peak_tflops:
            raise ValueError(f"GPU {self.name!r} has no peak_tflops for {dtype}; legal: {', '.join(self.peak_tflops)}")
        return self.peak_tflops[dtype]

    @property
    def device(self) -> str:
        """Type of torch's device."""
        return "cpu" if self.name == CPU else "cuda"

    @property
    def host_memory_bytes(self) -> float:
        """Host memory for each GPU, in bytes."""
        return self.host_memory_gib * 2**30

    @property
    def memory_bytes(self) -> float:
        """Memory, in bytes."""
        return self.memory_gib * 2**30


def read_gpus(user_file: str | None = None) -> dict[str, Gpu]:
    """The table of GPUs by name.

    Args:
        user_file: TOML file of the user's, which adds to the table or replaces entries. None: the table as it comes.

    Raises:
        ValueError: If the file is no TOML, or an entry lacks a field, has one too many or a figure out of its range.
        OSError: If the file cannot be read.
    """
    gpus = dict(_shipped())
    if user_file is not None:
        gpus |= _parse(Path(user_file).read_text(encoding="utf-8"), repr(user_file))
    return gpus


def find_gpu(name: str, user_file: str | None = None) -> Gpu:
    """One GPU of the table.

    Args:
        name: Its name.
        user_file: As `read_gpus` takes it.

    Raises:
        ValueError: If there is none of that name; lists all, with their memory in bytes.
        OSError: If the file cannot be read.
    """
    gpus = read_gpus(user_file)
    if name not in gpus:
        legal = ", ".join(f"{each} ({gpu.memory_bytes:.0f} bytes)" for each, gpu in gpus.items())
        near = get_close_matches(name, gpus, n=1, cutoff=0.3)
        hint = f"; nearest: {near[0]}" if near else ""
        raise ValueError(f"unknown GPU {name!r}{hint}; legal: {legal}; others go into a TOML file with the same fields")
    return gpus[name]


@cache
def _shipped() -> dict[str, Gpu]:
    return _parse(files("parallel.planner").joinpath("gpus.toml").read_text(encoding="utf-8"), "the table of GPUs")


def _parse(text: str, where: str) -> dict[str, Gpu]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is no TOML: {error}") from error
    return {name: _gpu(name, values, where) for name, values in table.items()}


def _gpu(name: str, values: Any, where: str) -> Gpu:
    known = {each.name: each.default is MISSING for each in fields(Gpu) if each.name != "name"}
    given = set(values) if isinstance(values, Mapping) else set()
    missing = sorted(each for each, is_needed in known.items() if is_needed and each not in given)
    if missing or given - set(known):
        raise ValueError(
            f"{where}, entry {name!r}: missing fields {missing}, unknown fields {sorted(given - set(known))}"
        )
    return Gpu(name=name, **values)
