"""The measures of saves in the background run, and say what their names promise."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest

from recipes.bench import background, checkpoint
from recipes.bench.rounds import Comparison
from tests.ranks import run_ranks


def compare(folder: Path) -> tuple[Comparison, Comparison]:
    small = dataclasses.replace(checkpoint.MODEL, num_layers=1, vocab_size=8192)
    with mock.patch.object(checkpoint, "MODEL", small):
        return background.compare_stall(1, str(folder)), background.compare_training(1, str(folder), num_steps=1)


def test_both_are_measured_on_two_ranks(tmp_path: Path) -> None:
    for stall, training in run_ranks(2, compare, tmp_path):
        assert list(stall.times_s) == ["plain copy", "ours"]
        assert list(training.times_s) == ["no save", "torch's async_save", "ours"]
        assert all(times for times in (*stall.times_s.values(), *training.times_s.values()))


def test_what_is_lost_is_what_a_save_adds() -> None:
    times_s = {"no save": [1.0, 2.0, 3.0], "torch's async_save": [3.0, 4.0, 5.0], "ours": [2.0, 3.0, 4.5]}
    assert background.lost_share(Comparison(title="", times_s=times_s, targets={})) == pytest.approx(0.5)
