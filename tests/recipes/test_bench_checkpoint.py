"""The bench of storage measures every contender, cold and warm, on the same bytes."""

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from models.llama import LlamaConfig
from recipes.bench import __main__ as bench
from recipes.bench import checkpoint, hub, raw_files, storage
from recipes.bench.aims import Aim
from recipes.bench.rounds import Comparison
from tests.ranks import run_ranks

TINY = LlamaConfig(num_layers=1, width=32, num_heads=4, num_kv_heads=2, feed_forward_width=48, vocab_size=64)
CONTENDERS = {"save": raw_files.WRITES, "load": raw_files.READS}


def compare(folder: Path) -> list[Comparison]:
    with mock.patch.object(checkpoint, "MODEL", TINY):
        return [
            checkpoint.compare_save(1, str(folder)),
            checkpoint.compare_load(1, str(folder), cold=True),
            checkpoint.compare_load(1, str(folder), cold=False),
        ]


def test_every_contender_is_measured_on_two_ranks(tmp_path: Path) -> None:
    for comparisons in run_ranks(2, compare, tmp_path):
        for comparison in comparisons:
            plain = CONTENDERS[comparison.title.split(",")[0]]
            assert list(comparison.times_s) == [checkpoint.TORCH, checkpoint.OURS, *plain]
            assert all(seconds > 0 for times in comparison.times_s.values() for seconds in times)


def test_the_command_prints_a_table_for_1_and_2_ranks_and_every_aim_beside_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(function: Any, *args: Any, num_processes: int, debug: bool) -> Any:
        if function in storage.MEASURES.values():
            return [Aim(what=f"{num_processes} ranks", value=1 << 20, limit=2 << 20, unit="bytes")]
        times_s = {checkpoint.TORCH: [1.0, 2.0], checkpoint.OURS: [1.0, 1.0], "plain": [0.8, 0.8]}
        return Comparison(title=f"{num_processes} ranks", times_s=times_s, targets={})

    def compare_import(rounds: int, path: str, num_ranks: int, *, cold: bool) -> tuple[Comparison, dict[str, int]]:
        times_s = {hub.THEIRS: [1.0, 1.0], hub.OURS: [0.4, 0.4]}
        memory = {hub.THEIRS: 3 << 20, hub.OURS: 1 << 20}
        return Comparison(title=f"import {num_ranks} ranks", times_s=times_s, targets={}), memory

    monkeypatch.setattr(storage, "run", run)
    monkeypatch.setattr(hub, "compare_import", compare_import)
    parts = ["save", "load_cold", "load_warm", "bytes", "memory", "import", "plan"]
    words = ["--parts", *parts, "--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    bench.main(["checkpoint", *words])
    figures = json.loads((tmp_path / "figures.json").read_text())
    # Imports are cold and warm.
    assert sum("times_s" in each for each in figures) == 2 * (3 + 2)
    aims = [each for each in figures if "met" in each]
    assert len(aims) == 2 * (2 + 2 + 1 + 1 + 1 + 4) + 3
    printed = capfd.readouterr().out
    assert printed.count("contender") == 2 * (3 + 2)
    assert len(re.findall(r"│ (NOT )?met +│", printed)) == len(aims)
    by_name = {each["what"]: each for each in aims}
    assert by_name["1 ranks: speed, of a plain"]["value"] == pytest.approx(0.8)
    assert not by_name["1 ranks: speed, of a plain"]["met"]
    assert by_name["import 2 ranks: time, of theirs"]["met"]
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def measure(folder: Path) -> list[Aim]:
    with mock.patch.object(checkpoint, "MODEL", TINY):
        return [*checkpoint.bytes_moved(str(folder)), *checkpoint.memory_of_save_and_load(str(folder))]


def test_bytes_and_memory_are_measured_on_two_ranks(tmp_path: Path) -> None:
    for busiest, read, *memory in run_ranks(2, measure, tmp_path):
        assert busiest.value >= 1 and read.value >= 1
        assert len(memory) == 3 and all(each.unit == "bytes" for each in memory)


def test_an_aim_is_met_at_its_limit_and_not_beyond() -> None:
    assert Aim(what="", value=0.5, limit=0.5).met and Aim(what="", value=0.5, limit=0.5, at_least=True).met
    assert not Aim(what="", value=0.51, limit=0.5).met
    assert not Aim(what="", value=0.49, limit=0.5, at_least=True).met


@pytest.mark.parametrize("write", raw_files.WRITES.values())
@pytest.mark.parametrize("read", raw_files.READS.values())
def test_plain_writes_and_reads_move_the_bytes(tmp_path: Path, write: raw_files.Action, read: raw_files.Action) -> None:
    views = [memoryview(bytearray(b"a" * 5000)), memoryview(bytearray(b"b" * (9 << 20)))]
    write(tmp_path / "file", views)
    found = [memoryview(bytearray(len(view))) for view in views]
    read(tmp_path / "file", found)
    assert found == views
