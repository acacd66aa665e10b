"""A ring's two halves are the library's, whatever the size, and what they send is what theory says."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import recipes.ring.__main__
from parallel import CollectiveCounter, ParallelConfig, build_mesh
from recipes.ring.__main__ import main
from recipes.ring.all_reduce import padded_chunks, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from recipes.ring.measure import Row, measure
from tests.ranks import run_ranks

SHAPES = [(0,), (1,), (3,), (8,), (13,), (3, 5), ()]


def sums_over_the_first(num_ranks: int) -> list[tuple[bool, int, int]]:
    """For each shape: whether the sum is the library's, and the bytes that this rank sent and received."""
    mesh = build_mesh(ParallelConfig())
    group = dist.new_group(list(range(num_ranks)))
    found = []
    for shape in SHAPES if dist.get_rank() < num_ranks else []:
        # Whole numbers, which any order adds alike.
        mine = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 10 * dist.get_rank()
        with CollectiveCounter(mesh) as counter:
            total = ring_all_reduce(mine, group)
        dist.all_reduce(mine, group=group)
        sent, received = (
            sum(each.payload_bytes for each in counter.records if each.kind == kind) for kind in ("send", "recv")
        )
        found.append((torch.equal(total, mine), sent, received))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_ring_sums_any_size_as_the_library_does_and_sends_a_padded_chunk_in_each_of_its_turns(num_ranks: int) -> None:
    expected = []
    for shape in SHAPES:
        padded = -(-torch.Size(shape).numel() // num_ranks) * num_ranks * 8
        expected.append((True, 2 * padded * (num_ranks - 1) // num_ranks, 2 * padded * (num_ranks - 1) // num_ranks))
    assert run_ranks(8, sums_over_the_first, num_ranks)[:num_ranks] == [expected] * num_ranks


def halves() -> bool:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    chunks = padded_chunks(torch.arange(7, dtype=torch.float64) * (rank + 1), group.size())
    theirs = torch.empty_like(chunks[0])
    dist.reduce_scatter_single(theirs, chunks.flatten(), group=group)
    ring_reduce_scatter(chunks, group)
    scattered = torch.equal(chunks[rank], theirs)
    everything = torch.empty_like(chunks)
    dist.all_gather_single(everything.view(-1), theirs, group=group)
    ring_all_gather(chunks, group)
    return scattered and torch.equal(chunks, everything)


def test_each_half_of_the_ring_is_the_collective_of_that_name() -> None:
    assert run_ranks(3, halves) == [True] * 3


def test_measured_bytes_are_those_of_theory_and_only_those_of_the_middle_grow_with_the_ranks() -> None:
    rows: list[Row] = run_ranks(8, measure, 1001)[0]
    assert [row.num_ranks for row in rows] == [2, 3, 4, 5, 6, 7, 8]
    assert all(row.is_right for row in rows)
    assert all(row.ring_bytes < 2 * row.padded_bytes for row in rows)
    assert [row.central_bytes for row in rows] == [2 * 8008 * (row.num_ranks - 1) for row in rows]
    # Random numbers: the orders differ in the last bits.
    assert 0 < max(row.largest_error for row in rows) <= 1


def run_command(words: list[str]) -> None:
    main(words)


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    run_ranks(3, run_command, ["--size", "10", "--json", str(tmp_path / "ring.json")])
    figures = json.loads((tmp_path / "ring.json").read_text())
    assert figures["num_elements"] == 10
    assert [(row["num_ranks"], row["ring_bytes"]) for row in figures["rows"]] == [(2, 80), (3, 128)]


def test_the_command_fails_where_a_figure_is_not_that_of_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Row(
        num_ranks=2,
        padded_bytes=8,
        ring_bytes=9,
        ring_theory_bytes=8,
        central_bytes=16,
        central_theory_bytes=16,
        largest_error=0.0,
    )
    monkeypatch.setattr(recipes.ring.__main__, "run", lambda *_, **__: [wrong])
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 1


@pytest.mark.parametrize(("words", "message"), [("--size -1", "size=-1 must be at least 0"), ("--nproc 0", "nproc=0")])
def test_bad_words_are_refused_in_one_message(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code != 0
    assert message in capsys.readouterr().err


def test_a_ring_of_one_is_refused() -> None:
    with pytest.raises(AssertionError, match="a ring needs at least 2 ranks, this job has 1"):
        run_ranks(1, measure, 10)
