"""Figures of tutorials: those that hold, those that do not, and what would have to be true of them."""

from dataclasses import replace
from pathlib import Path

import pytest

import parallel.planner
from parallel.planner.claim import Claim, as_markdown
from parallel.planner.claims import claims, of_bfloat16, of_more_gpus
from parallel.planner.claims_of_memory import of_fits, of_stages, of_states
from parallel.planner.claims_of_scaling import TRAFFIC_SHARES, communication_share, needed_bandwidth, speedups
from parallel.planner.hardware import find_gpu
from recipes.plan.models import find_shape


@pytest.fixture(scope="module")
def found() -> tuple[Claim, ...]:
    return claims(find_shape)


def test_the_table_that_lies_beside_the_planner_is_the_one_that_it_computes(found: tuple[Claim, ...]) -> None:
    # `python -m recipes.plan --claims > parallel/planner/CLAIMS.md`
    file = Path(parallel.planner.__path__[0]) / "CLAIMS.md"
    assert file.read_text(encoding="utf-8") == as_markdown(found)


def test_112_gb_over_n_and_headroom_of_the_peak_hold_and_nothing_else(found: tuple[Claim, ...]) -> None:
    said = [each.claim for each in found if each.holds]
    assert len(found) == 12
    assert [words.split(" ")[0] for words in said] == ["7B", "leave"]
    assert "112/14/3.5/1.75" in said[0]


def test_what_holds_changes_with_what_is_asked() -> None:
    assert [each.holds for each in of_states(7e9)] == [True, False]
    assert [each.holds for each in of_states(3.5e9)] == [False, True]
    assert [of_stages(ranks).holds for ranks in ((2, 8, 64), (2,), (3,))] == [False, False, True]
    assert of_more_gpus(find_shape, few=256, many=8).holds
    assert [each.holds for each in of_fits(lambda _: find_shape("llama2-7b"))] == [True, True]


def test_bfloat16_doubles_the_speed_where_float32_runs_at_half_its_peak() -> None:
    gpu = find_gpu("a100-80gb")
    peak = gpu.peak_tflops["bfloat16"]
    found = [
        of_bfloat16(find_shape, replace(gpu, peak_tflops={"bfloat16": peak, "float32": peak / part})).holds
        for part in (1, 2, 16)
    ]
    assert found == [False, True, False]


def test_56_gb_over_n_is_8_bytes_a_parameter_where_adamw_has_16(found: tuple[Claim, ...]) -> None:
    claim = found[1]
    assert claim.figure.startswith("56/7/1.75/0.875 GB is 8 bytes")
    assert "112/14/3.5/1.75" in claim.figure


def test_no_single_bandwidth_gives_the_speed_ups_that_tutorials_print() -> None:
    shape, gpu = find_shape("llama2-7b"), find_gpu("a100-80gb")
    said = {8: 7.0, 32: 25.0, 64: 45.0, 256: 140.0}
    needed = [needed_bandwidth(shape, gpu, "fsdp2", ranks, target) for ranks, target in said.items()]
    reached = [each for each in needed if each is not None]
    assert len(reached) == 4
    assert max(reached) > 1.2 * min(reached)


def test_a_bandwidth_that_is_said_to_be_needed_gives_the_speed_up() -> None:
    shape, gpu = find_shape("llama2-7b"), find_gpu("a100-80gb")
    few, many = (needed_bandwidth(shape, gpu, "ddp", 8, target) for target in (5.0, 7.0))
    assert few is not None and many is not None
    assert few < many
    assert needed_bandwidth(shape, gpu, "ddp", 8, 9.0) is None


def test_ddp_stops_scaling_beyond_some_hundreds_of_ranks() -> None:
    ranks = (8, 64, 512, 4096)
    found = speedups(find_shape("llama2-7b"), find_gpu("h100-80gb"), "ddp", ranks)
    shares = [speedup / each for speedup, each in zip(found, ranks, strict=True)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9
    assert shares[-1] < 0.5


def test_what_is_waited_for_is_less_than_what_is_sent_and_grows_where_the_batch_does_not() -> None:
    gpu = find_gpu("h100-80gb")
    for name, ranks, _ in TRAFFIC_SHARES:
        share = communication_share(find_shape, name, ranks, gpu)
        assert share.exposed < share.sent
    shares = [communication_share(find_shape, "7B", ranks, gpu, 2**21).exposed for ranks in (8, 64, 256)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
