"""Requests in other dtypes than bfloat16."""

from dataclasses import replace

import pytest

from parallel.planner.blocks import flops_of
from parallel.planner.bounds import Degrees, least_time_s
from parallel.planner.candidate import Compute, precision_of
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import model_costs
from parallel.planner.hardware import find_gpu
from parallel.planner.ranking import Plan
from parallel.planner.search import search
from parallel.precision import Precision
from tests.parallel.planner.requests import request

ASKED = request("llama3.1-8b", 4, 16)


def best(compute: Compute) -> Plan:
    return search(replace(ASKED, compute=compute), most=1).plans[0]


def test_float16_takes_the_time_of_bfloat16() -> None:
    half, brain = best("float16"), best("bfloat16")
    assert half.time == brain.time
    assert half.candidate.layout().precision.compute == "float16"


def test_float8_is_faster_than_bfloat16_but_not_twice_and_is_said_to_be_unvalidated() -> None:
    plan, brain = best("float8"), best("bfloat16")
    assert brain.time.step_s / 2 < plan.time.step_s < brain.time.step_s
    assert plan.memory.reserved >= 0.5 * brain.memory.reserved
    assert any("float8" in words for words in plan.unvalidated)
    assert not any("float8" in words for words in brain.unvalidated)
    precision = plan.candidate.layout().precision
    assert (precision.compute, precision.float8) == ("bfloat16", True)


def test_float8_is_planned_without_tp_and_its_bound_is_a_bound() -> None:
    asked = replace(ASKED, compute="float8")
    plans = search(asked, most=20).plans
    assert {plan.candidate.config.tp for plan in plans} == {1}
    for plan in plans:
        config = plan.candidate.config
        degrees = Degrees(config.pp, config.dp_replicate, config.dp_shard, config.cp, config.tp)
        bound = least_time_s(model_costs(asked.shape), asked, degrees, config.schedule, CONSTANTS)
        assert bound <= plan.time.step_s * (1 + 1e-9)


def test_float8_speeds_up_linear_maps_alone() -> None:
    gpu = find_gpu("h100-80gb")
    flops, of_maps = flops_of(precision_of("float8"), gpu, CONSTANTS)
    assert flops == flops_of(Precision(compute="bfloat16"), gpu, CONSTANTS)[0]
    assert of_maps == pytest.approx(2 * flops, rel=1e-3)


def test_a_dtype_that_the_gpu_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ValueError, match="has no peak_tflops for float8; legal: bfloat16, float16, float32"):
        replace(ASKED, gpu=find_gpu("a100-80gb"), compute="float8")
