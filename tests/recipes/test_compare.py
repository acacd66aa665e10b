"""The comparison of layouts: what it predicts, counts and draws, and that a failure is a row."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from matplotlib.axes import Axes

from parallel import ParallelConfig, Precision, Sharding
from parallel.ledger.live import LiveBytes
from parallel.ledger.states import Moments
from parallel.parallelize import BACKENDS
from parallel.traits import TRAITS
from recipes.command import parse_train
from recipes.compare.job import Outcome, run_job
from recipes.compare.layouts import SWEEPS, default_layouts, read_layout, sweep_layouts
from recipes.compare.pictures import draw_sweep
from recipes.compare.rows import Row
from recipes.find import find_recipe
from recipes.recipe import changed_fields
from tests.recipes.small_recipe import write_recipe_file

ROOT = Path(__file__).resolve().parents[2]
# The last one splits heads that do not divide.
LAYOUTS = ("ddp@2", "fsdp2:full_shard:keep_last_unit=true@2", "fsdp2:tp=2@2", "fsdp2:tp=3")
KEPT = LAYOUTS[1]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Folder and output of a comparison of tiny steps."""
    folder = tmp_path_factory.mktemp("compare")
    recipe = write_recipe_file(folder)
    words = [str(recipe), "--layouts", *LAYOUTS, "--steps", "7", "--global-batch", "4", "--folder", str(folder / "out")]
    process = subprocess.run(
        [sys.executable, "-m", "recipes.compare", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    return folder / "out", process


def report(done: tuple[Path, Any]) -> dict[str, dict[str, Any]]:
    return {row["layout"]: row for row in json.loads((done[0] / "report.json").read_text())}


def test_a_layout_that_fails_is_a_row_with_its_reason_and_the_exit_code_says_so(done: tuple[Path, Any]) -> None:
    process = done[1]
    assert process.returncode == 4, process.stderr
    rows = report(done)
    assert list(rows) == ["none", *LAYOUTS]
    assert [name for name, row in rows.items() if row["failure"] is not None] == [LAYOUTS[-1]]
    assert "tp=3 must divide num_heads=4" in rows[LAYOUTS[-1]]["failure"]
    assert f"5/5 {LAYOUTS[-1]}: failed: tp=3 must divide num_heads=4" in process.stdout
    assert process.stderr == ""


def test_what_was_sent_and_held_is_what_was_predicted(done: tuple[Path, Any]) -> None:
    rows = report(done)
    assert {row["residual_bytes"] for row in rows.values()} == {0}
    assert all(row["loss_difference"] < 1e-5 for row in rows.values() if row["failure"] is None)
    sent = {name: {(each["kind"], each["view"]) for each in row["traffic"]} for name, row in rows.items()}
    assert sent["none"] == set()
    assert sent["ddp@2"] == {("all_reduce", "dp_replicate")}
    assert sent[KEPT] == {("all_gather", "fsdp"), ("reduce_scatter", "fsdp"), ("all_reduce", "fsdp")}
    assert ("all_gather", "tp") in sent["fsdp2:tp=2@2"]


def test_a_timeline_shows_collectives_within_the_parts_of_a_step(done: tuple[Path, Any]) -> None:
    ranks = [rank["timeline"] for name in LAYOUTS[:-1] for rank in report(done)[name]["measured"]["ranks"]]
    assert len(ranks) == 6
    for timeline in ranks:
        start_s, end_s = timeline["step"].values()
        names = [name for name, _ in timeline["parts"]]
        assert names == ["forward", "backward"] * ((len(names) - 2) // 2) + ["clip", "optimizer"]
        bounds = [time_s for _, span in timeline["parts"] for time_s in span.values()]
        assert [start_s, *bounds, end_s] == sorted([start_s, *bounds, end_s])
        backward = [span for name, span in timeline["parts"] if name == "backward"]
        for each in timeline["collectives"]:
            assert start_s < each["start_s"] < each["end_s"] < end_s + 1e-3
            within = [span for span in backward if span["start_s"] < each["start_s"] < span["end_s"]]
            assert len(within) == (each["phase"] == "backward")
        waits = [time_s for span in timeline["waits"] for time_s in span.values()]
        assert waits == sorted(waits)
        assert start_s < waits[0] < waits[-1] < end_s + 1e-3


def test_the_report_has_tables_and_pictures(done: tuple[Path, Any]) -> None:
    folder = done[0]
    text = (folder / "report.md").read_text()
    pictures = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) == 2 + len(LAYOUTS)  # memory, traffic, and a timeline of each that ran and of one process
    for each in pictures:
        assert (folder / each).read_bytes().startswith(b"\x89PNG")
    for words in ("8P(R-1)/R", "12P(N-1)/N", "16P/N", "parameters again: units still there", "token count"):
        assert words in text


def die() -> None:
    """The second rank is ended as by a system that is out of memory."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("gloo")
    dist.barrier()


def hang() -> None:
    """The second rank never arrives."""
    if os.environ["RANK"] == "1":
        time.sleep(600)
    dist.init_process_group("gloo")
    dist.barrier()


def test_ranks_that_die_or_hang_end_in_a_reason() -> None:
    died = run_job(die, num_processes=2, limit_s=60)
    assert died.value is None
    assert died.failure is not None
    assert "rank 1 was ended by SIGKILL" in died.failure
    start_s = time.monotonic()
    hung = run_job(hang, num_processes=2, limit_s=3)
    assert hung.failure == "not done after 3 s; all ranks were ended"
    assert time.monotonic() - start_s < 30


def test_a_text_names_a_layout_and_what_it_leaves_out_is_the_recipe_s() -> None:
    base = ParallelConfig(tp=4, activation_checkpointing="full", precision=Precision(reduce="float32"))
    layout = read_layout("fsdp2:shard_grad_op:dp_shard=2,tp=2,compute=bfloat16,keep_last_unit=true", base)
    assert layout.num_ranks == 4
    assert layout.config == ParallelConfig(
        dp_shard=2,
        tp=2,
        strategy="shard_grad_op",
        activation_checkpointing="full",
        precision=Precision(compute="bfloat16", reduce="float32"),
        sharding=Sharding(keep_last_unit=True),
    )
    assert read_layout("ddp@4", base).num_ranks == 4
    assert read_layout("none", base).num_ranks == 1
    assert read_layout("fsdp2:tp=2", base).num_ranks == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsdp3@2", "unknown backend 'fsdp3'; legal: none, dp, ddp"),
        ("fsdp2:zero_3@2", "does not have the form"),
        ("fsdp2:width=2", "no field 'width'"),
        ("fsdp2:tp=two", "tp"),
        ("fsdp2:dp_shard=2@3", "multiply to 2"),
        ("ddp@many", "does not have the form"),
        ("ddp:keep_last_unit=true@2", "no meaning for ddp"),
    ],
)
def test_a_text_that_names_no_layout_is_refused_with_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="layout") as error:
        read_layout(text, ParallelConfig())
    assert text in str(error.value)
    assert words in str(error.value)


def test_the_default_holds_every_backend_and_strategy_at_two_and_four_ranks() -> None:
    layouts = default_layouts(find_recipe("llama_debug"), None)
    assert {layout.config.data_parallel for layout in layouts} == set(BACKENDS)
    for backend in BACKENDS:
        mine = [layout for layout in layouts if layout.config.data_parallel == backend]
        if TRAITS[backend].one_process:
            assert [layout.num_ranks for layout in mine] == [1]
        else:
            assert {layout.num_ranks for layout in mine} == {2, 4}
        if TRAITS[backend].shards:
            strategies = {layout.config.resolved_strategy for layout in mine if layout.num_ranks == 4}
            assert len(strategies) == 5
    assert {layout.num_ranks for layout in default_layouts(find_recipe("llama_debug"), 2)} == {1, 2}


@pytest.mark.parametrize("knob", SWEEPS)
def test_the_layouts_of_a_sweep_fit_the_recipe_and_differ(knob: str) -> None:
    recipe = find_recipe("llama_debug")
    layouts = sweep_layouts(knob, recipe)
    assert len({layout.config for layout in layouts}) == len(layouts) > 2
    for layout in layouts:
        dataclasses.replace(recipe, parallel=layout.config).check_layout(layout.num_ranks)


def row(text: str, step_time_s: float | None) -> Row:
    """A layout with a step of so many seconds, or one that failed."""
    held = LiveBytes(parameters=2**20, unsharded=0, gradients=2**20, optimizer_state=0)
    states = Moments(rest=held, after_forward=held, after_backward=held)
    report = SimpleNamespace(ranks=[SimpleNamespace(step_time_s=step_time_s, states=states)])
    failure = "no" if step_time_s is None else None
    outcome = Outcome(value=None if failure else report, failure=failure, warnings=(), time_s=1.0)
    return Row(layout=read_layout(text, ParallelConfig()), outcome=outcome)


def test_a_sweep_is_drawn_over_the_layouts_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[list[str], list[float]]] = []
    bar = Axes.bar

    def watched(axes: Axes, labels: list[str], heights: list[float], **options: Any) -> Any:
        drawn.append((labels, heights))
        return bar(axes, labels, heights, **options)

    monkeypatch.setattr(Axes, "bar", watched)
    rows = [row("ddp:bucket_cap_mb=1@2", 0.5), row("ddp:bucket_cap_mb=2@2", None), row("ddp:bucket_cap_mb=4@2", 0.25)]
    assert (tmp_path / draw_sweep("bucket_cap_mb", rows, tmp_path)).read_bytes().startswith(b"\x89PNG")
    labels = ["ddp:\nbucket_cap_mb=\n1@2", "ddp:\nbucket_cap_mb=\n4@2"]
    assert drawn == [(labels, [500.0, 250.0]), (labels, [2.0, 2.0])]


def test_from_ddp_to_fsdp2_a_recipe_changes_in_one_word() -> None:
    ddp, fsdp2 = (
        parse_train(["llama_debug", "--parallel.data-parallel", backend])[0].recipe for backend in ("ddp", "fsdp2")
    )
    assert changed_fields(ddp.to_json(), fsdp2.to_json()) == ["parallel.data_parallel ddp -> fsdp2"]
    for world_size in (1, 2, 8):
        ddp.check_layout(world_size)
        fsdp2.check_layout(world_size)
