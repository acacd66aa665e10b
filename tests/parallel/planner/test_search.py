import random
import time

import pytest

from models.llama import LlamaConfig
from parallel.planner.bounds import Degrees, Kind, least_bytes, least_time_s
from parallel.planner.candidate import Request
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import model_costs
from parallel.planner.enumeration import candidates, divisors, layouts, legal_degrees, schedules
from parallel.planner.explain import advise, refusal, what_binds, why_behind
from parallel.planner.hardware import find_gpu, read_gpus
from parallel.planner.search import Plan, evaluate, search, smallest


def request(
    model: str = "llama3.1-8b", gpus: int = 8, batch: int = 32, length: int = 4096, gpu: str = "h100-80gb"
) -> Request:
    return Request(
        shape=LlamaConfig.preset(model).shape,
        gpu=find_gpu(gpu),
        num_gpus=gpus,
        sequence_length=length,
        global_batch=batch,
    )


def everything(asked: Request) -> list[Plan]:
    """All candidates that fit, with nothing skipped."""
    costs = model_costs(asked.shape)
    return [
        evaluate(asked, costs, candidate, CONSTANTS)
        for degrees in legal_degrees(asked)
        for schedule in schedules(degrees)
        for config in layouts(asked, degrees, schedule, lambda kind: True)
        for micro_batch in divisors(asked.global_batch // (config.dp_replicate * config.dp_shard))
        for row in candidates(asked, config, micro_batch)
        for candidate in row
    ]


def test_a_search_finds_what_evaluating_everything_finds_and_its_bounds_are_bounds() -> None:
    asked = request(gpus=4, batch=8)
    plans, costs = everything(asked), model_costs(asked.shape)
    for plan in plans:
        config = plan.candidate.config
        degrees = Degrees(config.pp, config.dp_replicate, config.dp_shard, config.cp, config.tp)
        kind = Kind(config.data_parallel, config.strategy)
        assert least_time_s(costs, asked, degrees, config.schedule, CONSTANTS) <= plan.time.step_s * (1 + 1e-9)
        assert least_bytes(costs, asked, degrees, kind) <= plan.memory.allocated
    fitting = [plan for plan in plans if plan.memory.reserved <= asked.usable_bytes]
    best = min(fitting, key=lambda plan: (plan.doubted_s, plan.memory.reserved))
    found = search(asked).plans
    assert found[0] == best
    assert list(found) == sorted(found, key=lambda plan: (plan.doubted_s, plan.memory.reserved))


def test_every_candidate_is_a_layout_that_is_accepted() -> None:
    for plan in random.Random(0).sample(everything(request(gpus=8, batch=16)), 200):
        plan.candidate.layout()


@pytest.mark.parametrize("length", [8192, 131_072])
def test_405b_on_16384_gpus_takes_two_seconds_of_one_core_at_most(length: int) -> None:
    start_s = time.process_time()
    found = search(request("llama3.1-405b", 16_384, 2048, length))
    assert found.plans
    assert time.process_time() - start_s < 2.0


def test_a_model_that_fits_one_gpu_is_not_cut_and_one_a_little_too_large_is_sharded() -> None:
    small = search(request("llama3.2-1b", 8, 32, 2048)).plans[0].candidate.config
    large = search(request("llama3.1-8b", 8, 32)).plans[0].candidate.config
    assert (small.tp, small.pp, small.cp) == (large.tp, large.pp, large.cp) == (1, 1, 1)
    assert (large.data_parallel, large.dp_shard) == ("fsdp2", 8)


def test_terms_that_no_row_checks_are_named_and_have_to_win_by_an_allowance() -> None:
    plans = search(request("llama3.1-70b", 256, 512, 8192)).plans
    checked, unchecked = plans[0], next(plan for plan in plans if plan.unvalidated)
    assert checked.unvalidated == ()
    assert unchecked.unvalidated == ("what context parallel sends",)
    assert unchecked.doubted_s == pytest.approx(1.05 * unchecked.time.step_s)
    assert "behind" in why_behind(checked, unchecked)


def test_what_binds_and_what_a_change_would_bring_is_said() -> None:
    best = search(request("llama3.1-70b", 256, 512, 8192)).plans[0]
    assert what_binds(best).startswith("matrix products")
    gains = {advice.change: advice.tokens_per_s for advice in advise(best)}
    assert gains["half as much memory again"] > best.tokens_per_s
    assert all(gain >= 0.999 * best.tokens_per_s for gain in gains.values())


def test_what_does_not_fit_ends_with_the_bytes_that_are_missing_and_a_number_of_gpus_that_works() -> None:
    asked = request("llama3.1-70b", 8, 512, 8192)
    found, least = search(asked), smallest(asked)
    assert found.plans == ()
    assert least is not None
    assert least.memory.reserved == min(
        plan.memory.reserved for plan in everything(request("llama3.1-70b", 8, 512, 8192))
    )
    message = refusal(asked, found, read_gpus())
    assert f"{least.memory.reserved - asked.usable_bytes:.0f} bytes more than" in message
    assert message.endswith("nearest that works: 24 GPUs")


def test_gpus_that_no_degrees_divide_end_with_the_nearest_number_that_works() -> None:
    asked = request(gpus=37, batch=64)
    assert smallest(asked) is None
    assert refusal(asked, search(asked), read_gpus()).endswith("nearest that works: 36 GPUs")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus": 0}, "num_gpus=0 must be at least 1"),
        ({"length": 262_144}, "more than the model's max_sequence_length=131072"),
    ],
)
def test_a_request_without_sense_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request(**fields)  # type: ignore[arg-type]
