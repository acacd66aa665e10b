from parallel.planner.scaling import BEND, frontier, scale
from parallel.planner.search import search
from tests.parallel.planner.requests import request


def test_ring_latency_bends_ddp_before_full_shard_and_memory_falls_with_ranks() -> None:
    base = search(request("llama3.2-1b", 8, 16, 2048), most=1).plans[0]
    curves = {curve.name: curve for curve in scale(base, most_ranks=2048)}
    assert set(curves) == {"ddp", "full_shard", "hybrid_shard in groups of 8"}
    for curve in curves.values():
        shares = {each.ranks: each.latency_share for each in curve.points}
        assert all(share < BEND for ranks, share in shares.items() if curve.bend is None or ranks < curve.bend)
        assert curve.bend is None or shares[curve.bend] >= BEND
    bend = curves["ddp"].bend
    assert bend is not None and 64 < bend <= 1024
    whole, shared = (curves[name].points for name in ("ddp", "full_shard"))
    assert whole[0].plan.memory.optimizer_state == whole[-1].plan.memory.optimizer_state
    assert shared[-1].plan.memory.optimizer_state < shared[0].plan.memory.optimizer_state / 512


def test_every_point_has_as_many_sequences_on_each_rank() -> None:
    base = search(request("llama3.1-8b", 8, 32), most=1).plans[0]
    for curve in scale(base, most_ranks=64):
        for point in curve.points:
            assert point.plan.request.global_batch == 4 * point.ranks


def test_no_plan_of_the_frontier_has_one_that_is_smaller_and_as_fast() -> None:
    asked = request("llama3.1-8b", 8, 32)
    plans = frontier(asked)
    assert len(plans) > 3
    memory, speed = ([get(each) for each in plans] for get in (lambda p: p.memory.reserved, lambda p: p.tokens_per_s))
    assert memory == sorted(memory, reverse=True)
    assert speed == sorted(speed, reverse=True)
    assert all(each.request is asked for each in plans)
