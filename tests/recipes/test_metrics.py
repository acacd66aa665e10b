"""Records, their file, and the console."""

import dataclasses
import errno
import io
import json
import multiprocessing
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

from recipes.metrics import EvaluationMetrics, MetricsFile, Reporter, StepMetrics, format_bytes, peak_bytes


def _metrics(step: int, *, loss: float = 2.5, skipped: bool = False) -> StepMetrics:
    return StepMetrics(
        step=step,
        total_steps=100,
        epoch=0,
        loss=loss,
        gradient_norm=0.75,
        learning_rates={"matrices": 3e-4, "vectors": 3e-4},
        num_tokens=8000,
        tokens_seen=8000 * step,
        step_time_s=0.5,
        peak_bytes=300 * 2**20,
        skipped=skipped,
    )


def _evaluation(step: int) -> EvaluationMetrics:
    return EvaluationMetrics(step=step, loss=2.25, num_tokens=12345, time_s=1.0)


def _console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=200, highlight=False), file


def test_tokens_that_experts_had_no_room_for_are_told_where_there_are_experts() -> None:
    assert "train/num_dropped" not in _metrics(1).scalars()
    sparse = dataclasses.replace(_metrics(1), expert_load=((3, 5),), num_dropped=2)
    assert (sparse.scalars()["train/num_dropped"], sparse.record()["num_dropped"]) == (2, 2)


def test_the_console_line_shows_the_step_at_a_glance() -> None:
    assert _metrics(7).line() == (
        "step   7/100  loss  2.5000  grad   0.750  lr 3.00e-04   16.0k tok/s     500 ms/step  peak 300 MiB"
    )
    assert _metrics(7, skipped=True).line().endswith("SKIPPED")
    assert "16.0k tok/s  mfu 41.2 %     500 ms/step" in dataclasses.replace(_metrics(7), mfu=0.4123).line()
    apart = dataclasses.replace(_metrics(7), learning_rates={"matrices": 3e-4, "vectors": 3e-5})
    assert "  lr matrices 3.00e-04 vectors 3.00e-05  " in apart.line()
    assert _evaluation(7).line() == "after step 7: held-out loss 2.2500 on 12,345 tokens"


def test_the_file_holds_one_json_object_a_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(_metrics(1))
    file.write(_evaluation(1))
    step, evaluation = [json.loads(line) for line in path.read_text().splitlines()]
    file.close()
    assert step["kind"] == "step"
    assert (step["step"], step["loss"], step["tokens_per_s"]) == (1, 2.5, 16000.0)
    assert evaluation == {"kind": "evaluation", "step": 1, "loss": 2.25, "num_tokens": 12345, "time_s": 1.0}


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).write(_metrics(1, loss=float("nan")))
    assert '"loss": null' in path.read_text()


def test_a_resume_drops_later_steps_and_a_torn_line_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 3, 4):
        file.write(_metrics(step))
        file.write(_evaluation(step))
    file.close()
    with path.open("a") as torn:
        torn.write('{"kind": "step", "step": 2')
    resumed = MetricsFile(path, resumed_step=2)
    resumed.write(_metrics(3))
    resumed.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["kind"], record["step"]) for record in records] == [
        ("step", 1),
        ("evaluation", 1),
        ("step", 2),
        ("evaluation", 2),
        ("step", 3),
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_run_starts_an_empty_file_and_a_resume_needs_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, resumed_step=5).write(_metrics(6))
    assert path.read_text().count("\n") == 1
    MetricsFile(path)
    assert path.read_text() == ""


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, no folder")
    with pytest.raises(ValueError, match=r"cannot write metrics to .*taken/metrics\.jsonl"):
        MetricsFile(tmp_path / "taken" / "metrics.jsonl")


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(file, "_file", mock.Mock(write=mock.Mock(side_effect=full))),
        pytest.raises(OSError, match=r"cannot write metrics to .*/metrics\.jsonl': No space left on device"),
    ):
        file.write(_metrics(1))


def test_without_a_terminal_there_are_plain_lines_every_so_many_steps() -> None:
    console, file = _console()
    with Reporter(total_steps=100, done_steps=30, every_steps=50, console=console) as reporter:
        for step in range(31, 101):
            reporter.step(_metrics(step, skipped=step == 40))
        reporter.evaluation(_evaluation(100))
        reporter.message("[saved] checkpoint")
    lines = file.getvalue().splitlines()
    assert [line.split("  loss")[0] for line in lines] == [
        "step  31/100",
        "step  40/100",
        "step  50/100",
        "step 100/100",
        "after step 100: held-out loss 2.2500 on 12,345 tokens",
        "[saved] checkpoint",
    ]
    assert "\x1b" not in file.getvalue()


def test_on_a_terminal_there_is_a_bar_too() -> None:
    console, file = _console(terminal=True)
    with Reporter(total_steps=100, console=console) as reporter:
        reporter.step(_metrics(100))
    assert "100/100" in file.getvalue()
    assert "━" in file.getvalue()


def test_ranks_other_than_0_are_silent() -> None:
    for terminal in (False, True):
        console, file = _console(terminal=terminal)
        with Reporter(total_steps=2, rank=1, every_steps=1, console=console) as reporter:
            reporter.step(_metrics(1))
            reporter.message("hello")
        assert file.getvalue() == ""


def _peaks_around(num_bytes: int) -> list[int]:
    peaks = [peak_bytes(torch.device("cpu"))]
    held = bytearray(b"x") * num_bytes
    peaks.append(peak_bytes(torch.device("cpu")))
    del held
    return [*peaks, peak_bytes(torch.device("cpu"))]


def test_peak_memory_grows_by_what_the_process_holds_and_stays() -> None:
    # In a process of its own, since this one may have had a higher peak before.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        before, during, after = pool.apply(_peaks_around, (256 * 2**20,))
    assert during - before == pytest.approx(256 * 2**20, rel=0.2)
    # The kernel's count is off by some pages.
    assert after > 0.99 * during


def test_bytes_are_shown_in_binary_units() -> None:
    assert format_bytes(300 * 2**20) == "300 MiB"
    assert format_bytes(3 * 2**29) == "1.50 GiB"
