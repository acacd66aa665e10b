"""The bench of imports measures both on ranks of their own, until parameters are in memory."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from models.llama import LlamaConfig
from parallel import build_mesh
from recipes.bench import hub
from tests.ranks import run_ranks

TINY = LlamaConfig(num_layers=1, width=32, num_heads=4, num_kv_heads=2, feed_forward_width=48, vocab_size=64)


def measured(path: str, *names: str) -> list[tuple[float, int]]:
    with mock.patch.object(hub, "MODEL", TINY):
        hub.write_folder(path)
    return [hub.import_on_rank(name, path) for name in names]


def imported(path: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    measured(path, hub.THEIRS)
    return hub._import_theirs(path), hub._import_ours(path, build_mesh(hub.LAYOUT, "cpu"))


def test_ours_is_measured_on_two_ranks(tmp_path: Path) -> None:
    for ((time_s, num_bytes),) in run_ranks(2, measured, str(tmp_path / "hub"), hub.OURS):
        assert time_s > 0 and num_bytes >= 0


def test_both_end_with_the_same_values_of_the_same_dtype(tmp_path: Path) -> None:
    ((theirs, ours),) = run_ranks(1, imported, str(tmp_path / "hub"))
    assert {each.dtype for each in (*theirs, *ours)} == {torch.bfloat16}
    assert sorted(each.double().sum().item() for each in theirs) == sorted(each.double().sum().item() for each in ours)


def test_each_import_has_ranks_of_its_own_and_turns_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def run(function: Any, name: str, path: str, *, num_processes: int, debug: bool) -> tuple[float, int]:
        assert (function, num_processes, debug) == (hub.import_on_rank, 2, False)
        calls.append(name)
        return float(len(calls)), 10 * len(calls)

    monkeypatch.setattr(hub, "run", run)
    comparison, memory = hub.compare_import(2, str(tmp_path), 2, cold=True)
    assert calls == [hub.OURS, hub.THEIRS, hub.THEIRS, hub.OURS]
    assert comparison.times_s == {hub.THEIRS: [2.0, 3.0], hub.OURS: [1.0, 4.0]}
    assert memory == {hub.THEIRS: 30, hub.OURS: 40}
