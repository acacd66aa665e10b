import time
from dataclasses import replace

import pytest

from models.moe import MoeConfig
from parallel.planner.bounds import Degrees, Kind, least_bytes, least_time_s
from parallel.planner.candidate import Request
from parallel.planner.choices import choices, fastest, leanest
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import model_costs
from parallel.planner.explain import advise, refusal, what_binds, why_behind
from parallel.planner.hardware import find_gpu, read_gpus
from parallel.planner.memory import predict_memory
from parallel.planner.ranking import Plan, rank
from parallel.planner.search import search, smallest
from parallel.planner.timing import predict_time
from parallel.planner.waiting import join_ranks
from tests.parallel.planner.requests import everything, request

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


SMALL = request(gpus=4, batch=4)


@pytest.fixture(scope="module")
def every() -> list[Plan]:
    return everything(SMALL)


def test_a_search_finds_what_evaluating_everything_finds_and_its_bounds_are_bounds(every: list[Plan]) -> None:
    small, costs = SMALL, model_costs(SMALL.shape)
    for plan in every:
        config = plan.candidate.config
        degrees = Degrees(config.pp, config.dp_replicate, config.dp_shard, config.cp, config.tp)
        kind = Kind(config.data_parallel, config.strategy, config.sharding.cpu_offload)
        assert least_time_s(costs, small, degrees, config.schedule, CONSTANTS) <= plan.time.step_s * (1 + 1e-9)
        assert least_bytes(costs, small, degrees, kind) <= plan.memory.allocated
    best: dict[tuple[object, ...], tuple[float, float]] = {}
    for plan in every:
        config = plan.candidate.config
        way = (*(getattr(config, axis) for axis in AXES), config.resolved_strategy)
        if plan.fits:
            best[way] = min(best.get(way, rank(plan)), rank(plan))
    found = search(small).plans
    expected = sorted(best.values())[: len(found)]
    assert [plan.ranked_s for plan in found] == pytest.approx([ranked_s for ranked_s, _ in expected])
    assert len(found) == 10


@pytest.mark.parametrize("most", [1, 3])
def test_the_best_does_not_depend_on_how_many_are_asked_for(most: int) -> None:
    for asked in (request("llama3.1-8b", 64, 128), request("llama3.1-8b", 64, 256), request("llama2-13b", 16, 64)):
        many, few = search(asked, most=12).plans, search(asked, most=most).plans
        assert few == many[:most]


def test_what_is_enumerated_covers_every_axis_and_choice() -> None:
    plans = everything(replace(request("debug", 4, 4, 64), compile=False))
    layouts = [plan.candidate.layout() for plan in plans[::7]]
    seen = {
        name: {getattr(each, name) for each in layouts}
        for name in ("data_parallel", "resolved_strategy", "schedule", "cp_method", "sequence_parallel", "tp")
    }
    assert seen["data_parallel"] == {"ddp", "zero1", "fsdp1", "fsdp2"}
    assert len(seen["resolved_strategy"]) == 5
    assert seen["schedule"] >= {"gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble", "dual_pipe_v"}
    assert seen["cp_method"] == {None, "allgather", "ring", "ulysses"}
    assert seen["sequence_parallel"] == {True, False}
    assert {each.sharding.units for each in layouts} == {"block", "size", "model"}
    assert {each.sharding.reshard_group for each in layouts} >= {None, 2}
    assert {each.sharding.forward_prefetch for each in layouts} == {0, 2, 3}
    assert {each.buckets.bucket_cap_mb for each in layouts} == {5.0, 25.0, 100.0, 400.0}
    assert {each.precision.reduce for each in layouts} == {"float32", "bfloat16"}
    assert {each.sharding.cpu_offload for each in layouts} == {True, False}
    assert {plan.candidate.reduce_gradients for plan in plans} == {"every_micro_batch", "last"}
    assert {each.activation_checkpointing for each in layouts} == {"none", "selective", "full"}


def test_no_options_are_faster_or_leaner_than_those_that_stand_for_all(every: list[Plan]) -> None:
    small, costs = SMALL, model_costs(SMALL.shape)
    for plan in every[::97]:
        candidate = plan.candidate
        options = choices(small, costs, candidate)
        ranks = join_ranks(candidate.config, small.gpu, CONSTANTS)
        times = {
            each: predict_time(costs, candidate._replace(options=each), 4096, small.gpu, CONSTANTS, ranks).step_s
            for each in {*options, *fastest(options)}
        }
        assert min(times[each] for each in fastest(options)) <= min(times[each] for each in options) * (1 + 1e-9)
        held = {
            each: predict_memory(costs, candidate._replace(options=each), 4096, CONSTANTS).reserved for each in options
        }
        assert held[leanest(options)] == min(held.values())


@pytest.mark.parametrize("length", [8192, 131_072])
def test_405b_on_16384_gpus_takes_two_seconds_of_one_core_at_most(length: int) -> None:
    start_s = time.process_time()
    found = search(request("llama3.1-405b", 16_384, 2048, length), most=5)
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
    assert unchecked.ranked_s == pytest.approx(1.05 * unchecked.time.step_s)
    assert "behind" in why_behind(checked, unchecked)


def test_what_binds_and_what_a_change_would_bring_is_said() -> None:
    best = search(request("llama3.1-70b", 256, 512, 8192)).plans[0]
    assert what_binds(best).startswith("matrix products")
    gains = {advice.change: advice.tokens_per_s for advice in advise(best)}
    assert gains["half as much memory again"] > best.tokens_per_s
    assert gains["twice the bandwidth between nodes"] > best.tokens_per_s
    assert len(gains) == 5


def test_experts_are_planned_for_with_ep_and_marked_as_unvalidated() -> None:
    shape = MoeConfig.preset("qwen3-30b-a3b").shape
    asked = Request(shape=shape, gpu=find_gpu("h100-80gb"), num_gpus=16, sequence_length=4096, global_batch=64)
    plans = search(asked, most=20).plans
    assert {plan.candidate.config.ep for plan in plans} > {1}
    assert all("matmuls of experts" in plan.unvalidated for plan in plans)
    shared, whole = (next(each for each in plans if (each.candidate.config.ep > 1) is asks) for asks in (True, False))
    assert shared.time.ep_s > 0 == whole.time.ep_s


def test_what_does_not_fit_ends_with_the_bytes_that_are_missing_and_a_number_of_gpus_that_works() -> None:
    asked = request("llama3.1-405b", 8, 8, 131_072)
    found, least = search(asked), smallest(asked)
    assert found.plans == ()
    assert least is not None
    message = refusal(asked, found, read_gpus())
    assert f"{least.memory.reserved - asked.usable_bytes:.0f} bytes more than" in message
    assert message.endswith("nearest that works: 32 GPUs")


def test_states_that_host_memory_lacks_are_told_in_bytes() -> None:
    asked = replace(request("llama3.1-70b", 8, 8, 2048), gpu=replace(find_gpu("h100-80gb"), host_memory_gib=8.0))
    message = refusal(asked, search(asked), read_gpus())
    assert "bytes of host memory for each" in message


def test_the_smallest_layout_holds_least_of_all(every: list[Plan]) -> None:
    least = smallest(SMALL)
    assert least is not None
    assert least.memory.reserved == min(plan.memory.reserved for plan in every)


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
