"""The bench of storage measures every contender, cold and warm, on the same bytes."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from models.llama import LlamaConfig
from recipes.bench import __main__ as bench
from recipes.bench import checkpoint, hub, raw_files
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


def test_the_command_prints_a_table_for_1_and_2_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(function: Any, *args: Any, num_processes: int, debug: bool) -> Any:
        if function is checkpoint.memory_of_save_and_load:
            return {"save": 1 << 20, "load": 2 << 20}
        return Comparison(
            title=f"{num_processes} ranks", times_s={"theirs": [1.0, 2.0], "ours": [1.0, 1.0]}, targets={}
        )

    def compare_import(rounds: int, path: str, num_ranks: int, *, cold: bool) -> tuple[Comparison, dict[str, int]]:
        return run(None, num_processes=num_ranks, debug=False), {hub.THEIRS: 3 << 20, hub.OURS: 1 << 20}

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(hub, "compare_import", compare_import)
    parts = ["save", "load_cold", "load_warm", "memory", "import"]
    words = ["--parts", *parts, "--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    bench.main(["checkpoint", *words])
    # Imports are cold and warm.
    assert len(json.loads((tmp_path / "figures.json").read_text())) == 2 * (len(parts) + 1)
    printed = capfd.readouterr().out
    assert printed.count("contender") == 2 * (3 + 2)
    assert printed.count("transformers from_pretrained 3 MiB, ours 1 MiB (aim: ours less)") == 2 * 2
    assert "memory beside the state, 2 ranks: save 1 MiB, load 2 MiB" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.parametrize("write", raw_files.WRITES.values())
@pytest.mark.parametrize("read", raw_files.READS.values())
def test_plain_writes_and_reads_move_the_bytes(tmp_path: Path, write: raw_files.Action, read: raw_files.Action) -> None:
    views = [memoryview(bytearray(b"a" * 5000)), memoryview(bytearray(b"b" * (9 << 20)))]
    write(tmp_path / "file", views)
    found = [memoryview(bytearray(len(view))) for view in views]
    read(tmp_path / "file", found)
    assert found == views
