"""Writes a comparison as Markdown with pictures, and as JSON."""

import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from recipes.compare.rows import Row
from recipes.compare.tables import Words, forms_table, memory_table, notes, summary, terms_table, traffic_table


def write_report(rows: Sequence[Row], folder: Path, *, command: str, knob: str | None) -> None:
    """Writes report.md, report.json and the pictures, of which there are none without matplotlib.

    Args:
        rows: The comparison; the first is the one process that losses are compared with.
        folder: Where to write; it is made.
        command: What was called.
        knob: What was swept; None: nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, str] = {}
    if importlib.util.find_spec("matplotlib") is not None:
        # Not at the top: an extra.
        from recipes.compare.pictures import draw, draw_sweep

        pictures = draw(rows, folder)
        if knob is not None:
            pictures["sweep"] = draw_sweep(knob, rows[1:], folder)
    (folder / "report.md").write_text(_markdown(rows, pictures, command))
    (folder / "report.json").write_text(json.dumps([row.to_json(rows[0]) for row in rows], indent=1))


def _markdown(rows: Sequence[Row], pictures: dict[str, str], command: str) -> str:
    parts = [
        "# Layouts compared",
        f"`{command}`",
        f"{platform.system()}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs, torch {torch.__version__}. "
        "Payloads are counted in a real step and turned into bytes on the wire by the model of a ring; bytes held are "
        "those of live tensors. Predictions were made before the step; a residual other than 0 is a fault.",
        _table(summary(rows)),
        "\n".join(f"- {each}" for each in notes(rows)),
        *(_picture(name, pictures) for name in ("sweep", "memory", "traffic")),
        _table(forms_table(rows)),
        _table(traffic_table(rows)),
        _table(memory_table(rows)),
        "## The course of a step",
        "Grey: what rank 0 does. Coloured: collectives from their call to their end. Black: the rank waits.",
        *(_picture(row.layout.name, pictures) for row in rows),
        "## The terms of each prediction",
        *(_table(terms_table(row)) for row in rows if row.report is not None and row.report.ranks[0].predicted),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _picture(name: str, pictures: dict[str, str]) -> str:
    return f"![{name}]({pictures[name]})" if name in pictures else ""


def _table(words: Words) -> str:
    lines = [
        f"**{words.title}**",
        "",
        f"| {' | '.join(words.columns)} |",
        f"|{'---|' * len(words.columns)}",
        *(f"| {' | '.join(each.replace('|', '/') for each in row)} |" for row in words.rows),
    ]
    return "\n".join(lines)
