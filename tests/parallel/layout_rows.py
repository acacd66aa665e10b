"""The layouts that must train and those that must be refused, for one small model of each kind."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel import ModelShape, ParallelConfig

FOLDER = Path(__file__).parent / "layouts"
SEQUENCE_LENGTH = 32
DENSE = ModelShape(
    num_layers=4,
    width=64,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    feed_forward_width=176,
    vocab_size=260,
    max_sequence_length=2048,
)
MOE = replace(DENSE, num_experts=8, num_experts_per_token=2)


def rows(name: str) -> list[dict[str, str]]:
    """The rows of one of the tables."""
    with (FOLDER / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def name_of(row: dict[str, str]) -> str:
    """A row in a few words, for test ids."""
    degrees = [
        f"{axis}{row[axis]}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep") if row[axis] != "1"
    ]
    words = [
        row["backend"],
        row["strategy"],
        *degrees,
        row["schedule"],
        row["cp_method"],
        row["activation_checkpoint"],
    ]
    return "-".join(word for word in words if word and word != "none") + (
        "" if row["sequence_parallel"] == "yes" else "-nosp"
    )


def config_of(row: dict[str, str]) -> ParallelConfig:
    """The config that a row asks for."""
    fields: dict[str, Any] = {axis: int(row[axis]) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    return ParallelConfig(
        **fields,
        data_parallel=row["backend"],  # type: ignore[arg-type]
        strategy=row["strategy"] or None,  # type: ignore[arg-type]
        schedule=row["schedule"] or None,  # type: ignore[arg-type]
        cp_method=row["cp_method"] or None,  # type: ignore[arg-type]
        sequence_parallel=row["sequence_parallel"] == "yes",
        activation_checkpointing=row["activation_checkpoint"],  # type: ignore[arg-type]
    )


def shape_of(row: dict[str, str]) -> ModelShape:
    """The model that a row is about."""
    return MOE if row["model"] == "moe" else DENSE
