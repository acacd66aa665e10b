"""The sharding unit written by hand does what `fully_shard` does, and says truly what it holds and sends."""

import ast
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.llama import Llama, llama_plan
from parallel import CollectiveCounter, ParallelConfig, build_mesh, materialize, parallelize
from recipes.sharding_by_hand.__main__ import main
from recipes.sharding_by_hand.train import MODEL, UNITS, Comparison, Moment, compare, train_by_hand
from tests.parallel.small_model import batches
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
WHOLE_BYTES = [8 * each for each in (260 * 64, 46208, 46208, 64 + 260 * 64)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_its_losses_are_those_of_fully_shard(num_ranks: int) -> None:
    comparison: Comparison = run_ranks(num_ranks, compare, 5)[0]
    assert len(set(comparison.by_hand)) == 5
    assert comparison.difference < 1e-12


def counted_by_hand() -> tuple[Counter[tuple[str, str, int]], list[Moment]]:
    """What the first step sends by kind and payload, and what the log says of it."""
    mesh = build_mesh(ParallelConfig())
    torch.manual_seed(0)
    with CollectiveCounter(mesh) as counter:
        _, life = train_by_hand(Llama(MODEL).double(), mesh, 1)
    return Counter((each.kind, each.phase, each.payload_bytes) for each in counter.records), life


def counted_of_fully_shard() -> Counter[tuple[str, str, int]]:
    mesh = build_mesh(ParallelConfig())
    with torch.device("meta"):
        model = Llama(MODEL).double()
    trained = parallelize(model, mesh, mesh.config, replace(llama_plan(MODEL), units=UNITS))
    materialize(trained)
    with CollectiveCounter(mesh) as counter:
        trained.forward_backward(batches(mesh, 0))
    return Counter((each.kind, each.phase, each.payload_bytes) for each in counter.records)


def without_scalars(counts: Counter[tuple[str, str, int]]) -> Counter[tuple[str, str, int]]:
    return Counter({each: number for each, number in counts.items() if each[0] != "all_reduce"})


def test_it_sends_what_fully_shard_sends_and_says_so() -> None:
    counts, life = run_ranks(2, counted_by_hand)[0]
    theirs = run_ranks(2, counted_of_fully_shard)[0]
    assert without_scalars(counts) == without_scalars(theirs)
    assert set(without_scalars(counts)) == {
        (kind, phase, payload)
        for kind, phase in (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"))
        for payload in WHOLE_BYTES
    }
    # Around a ring of two ranks each sends half of a payload.
    assert sum(each.sent_bytes for each in life) == 3 * sum(WHOLE_BYTES) // 2


def test_a_rank_holds_no_more_than_two_units_whole_and_between_steps_only_shards() -> None:
    _, life = run_ranks(2, counted_by_hand)[0]
    assert max(each.whole_bytes for each in life) == 2 * max(WHOLE_BYTES)
    # One unit's gradients at a time, its parameters being gone by then.
    assert max(each.gradient_bytes for each in life) == max(WHOLE_BYTES)
    sharded, end = life[len(UNITS) - 1], life[-1]
    assert (sharded.what, sharded.whole_bytes, sharded.shard_bytes) == ("shard", 0, sum(WHOLE_BYTES) // 2)
    assert (end.whole_bytes, end.gradient_bytes, end.shard_bytes) == (0, 0, sum(WHOLE_BYTES))


def test_each_unit_but_the_first_to_run_is_gathered_ahead_in_forward_and_backward() -> None:
    _, life = run_ranks(2, counted_by_hand)[0]
    gathers = [(each.unit, each.what) for each in life if each.what.startswith("gather")]
    first, *others, last = [" + ".join(unit.modules) for unit in UNITS]
    ahead = "gather ahead"
    forward = [(first, "gather"), *((name, ahead) for name in [*others, last])]
    backward = [(last, "gather"), *((name, ahead) for name in [*reversed(others), first])]
    assert gathers == [*forward, *backward]
    assert [each.what for each in life if each.unit == others[0]] == [
        "shard",
        *(ahead, "forward", "free"),
        *(ahead, "backward", "free", "reduce-scatter"),
    ]


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names} | {
        node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)
    }


def test_nothing_else_imports_it() -> None:
    packages = ("parallel", "models", "checkpoint", "recipes")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    users = [path for path in files if any(name.startswith("recipes.sharding_by_hand") for name in imported(path))]
    assert users
    assert {path.parent.name for path in users} == {"sharding_by_hand"}


def run_command(words: list[str]) -> None:
    main(words)


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    run_ranks(2, run_command, ["--steps", "2", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["by_hand"]) == len(found["fully_shard"]) == 2
    assert found["life"][0] == {
        "unit": "embed",
        "what": "shard",
        "sent_bytes": 0,
        "whole_bytes": 0,
        "gradient_bytes": 0,
        "shard_bytes": WHOLE_BYTES[0] // 2,
    }


def test_no_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "steps=0 must be at least 1" in capsys.readouterr().err
