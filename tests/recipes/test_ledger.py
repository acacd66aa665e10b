"""The ledger's command: predicted beside a real step, and one rank of a job of any size."""

import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from models.layers.lora import LoraConfig
from parallel import Buckets, LossScaling, ParallelConfig, Precision
from parallel.ledger.term import counted_traffic, traffic
from recipes.find import find_recipe
from recipes.ledger.__main__ import main
from recipes.ledger.dry import dry_ledger
from recipes.ledger.fake import check_fake, fake_step
from recipes.ledger.forecast import coordinates_of
from recipes.ledger.measure import RankLedger, measure
from recipes.ledger.rows import Line, lines
from recipes.ledger.traced import TracedStep
from recipes.optimizer import OptimizerConfig
from recipes.recipe import Recipe
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
STREAM_BYTES = 2 * 64 * 64 * 2
"""Two sequences of 64 tokens, 64 wide, in bfloat16."""
TRIES = 3
"""Real steps until one holds no more than it must: threads that send let go of a buffer when they are scheduled."""
NORM_BYTES = 5 * 64 * 4
"""Norms of two blocks and the last, 64 wide, in float32."""
BF16 = Precision(compute="bfloat16", reduce="float32")
FP16 = Precision(compute="float16", reduce="float32")


def small(
    layout: dict[str, Any], *, documents: bool = True, global_batch: int = 4, name: str = "llama_debug"
) -> Recipe:
    """Two layers and short sequences, in a layout."""
    base = find_recipe(name)
    return dataclasses.replace(
        base,
        parallel=ParallelConfig(**layout),
        model=dataclasses.replace(base.model, num_layers=2),  # type: ignore[call-arg]  # the field is its family's
        training=dataclasses.replace(base.training, micro_batch=2, global_batch=global_batch),
        data=dataclasses.replace(base.data, sequence_length=64, attend_across_documents=not documents),
    )


def sent(traced: TracedStep) -> Counter[Any]:
    """How often a step sent what."""
    return Counter((each.kind, each.view, each.phase, each.payload_bytes, each.dtype) for each in traced.collectives)


def bytes_apart(one: TracedStep, other: TracedStep) -> int:
    """By how much two steps differ in what they hold, at the moment when they differ most."""
    names = ("rest_bytes", "after_forward_bytes", "after_backward_bytes", "peak_bytes")
    return max(abs((getattr(one, name) or 0) - (getattr(other, name) or 0)) for name in names)


def real_ranks(recipe: Recipe) -> tuple[RankLedger, ...]:
    return measure(recipe)


def without_values(recipe: Recipe, world_size: int, rank: int, num_micro_batches: int) -> TracedStep:
    """In a process of the pool, so that nothing of the fake group stays in this one."""
    dist.destroy_process_group()
    return fake_step(recipe, world_size, rank, num_micro_batches, look=coordinates_of)[0]


SAME: dict[str, tuple[int, dict[str, Any], bool]] = {
    "full_shard": (2, {}, True),
    "hybrid_shard x tp in bf16": (4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "strategy": "hybrid_shard"}, True),
    "pp": (2, {"pp": 2, "schedule": "1f1b", "precision": BF16}, True),
    "full_shard over 4 micro-batches, reduced last": (2, {"reduce_gradients": "last", "precision": BF16}, True),
    "cp by all-gather without documents": (2, {"cp": 2, "cp_method": "allgather"}, False),
    "full_shard in fp16": (2, {"precision": FP16}, True),
    "ddp, static graph": (2, {"data_parallel": "ddp", "buckets": Buckets(static_graph=True, bucket_cap_mb=0.1)}, True),
    "zero1 in bf16": (2, {"data_parallel": "zero1", "precision": BF16}, True),
    "fsdp1 shard_grad_op, reduced last": (
        2,
        {"data_parallel": "fsdp1", "strategy": "shard_grad_op", "reduce_gradients": "last", "precision": BF16},
        True,
    ),
    "fsdp1 with adapters": (2, {"data_parallel": "fsdp1"}, True),
    "experts, full_shard": (2, {}, True),
    "experts, ep x tp": (4, {"ep": 2, "tp": 2}, True),
    "experts, fsdp1": (2, {"data_parallel": "fsdp1"}, True),
}


SLOW = ("hybrid_shard x tp in bf16", "experts, ep x tp", "experts, fsdp1")


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else []) for each in SAME]
)
def test_a_step_without_values_is_the_real_step(case: str) -> None:
    world_size, layout, documents = SAME[case]
    name = "moe_debug" if "experts" in case else "llama_debug"
    recipe = small(layout, documents=documents, global_batch=(8 if "over 4" in case else 4) * world_size, name=name)
    if "adapters" in case:
        recipe = dataclasses.replace(recipe, lora=LoraConfig(rank=8))
    config = recipe.parallel
    num_micro_batches = recipe.training.num_micro_batches(world_size // (config.tp * config.cp * config.pp))
    ranks = (0, world_size - 1)
    # The loss is read where it has a value; what is sent is held until the sending thread lets go of it: a stream
    # between stages, gradients of norms between ranks that split tensors.
    tolerance = 16 + (config.pp > 1) * STREAM_BYTES + (config.tp > 1) * NORM_BYTES
    fakes = [run_ranks(1, without_values, recipe, world_size, rank, num_micro_batches)[0] for rank in ranks]
    for _ in range(TRIES):
        ledgers = run_ranks(world_size, real_ranks, recipe)[0]
        reals = [ledgers[rank].traced for rank in ranks]
        apart = max(map(bytes_apart, fakes, reals))
        if apart <= tolerance:
            break
    assert apart <= tolerance
    for fake, real, rank in zip(fakes, reals, ranks, strict=True):
        assert sent(fake) == sent(real)
        assert traffic(ledgers[rank].predicted.terms) == counted_traffic(real.collectives)
        assert fake.states == real.states
        # Where two moments are a few bytes apart, a unit may be gathered in one of them.
        assert dataclasses.replace(fake.at_peak, unsharded=0) == dataclasses.replace(real.at_peak, unsharded=0)


def test_a_float16_step_that_overflows_at_its_first_scale_is_traced_and_holds_what_was_predicted() -> None:
    scaling = LossScaling(initial=2.0**60)
    recipe = small({"precision": dataclasses.replace(FP16, loss_scaling=scaling)})
    for ledger in run_ranks(2, real_ranks, recipe)[0]:
        assert ledger.traced.states.rest.optimizer_state > 0
        broken = [line.what for line in lines(ledger.predicted, ledger.traced) if not line.holds]
        assert not broken


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recipes.ledger", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )


SMALL_WORDS = ("--model.num-layers", "2", "--data.sequence-length", "64", "--training.micro-batch", "4")


def test_the_command_sets_a_real_step_beside_what_was_predicted() -> None:
    done = run("llama_debug", "--nproc", "2", "--json", *SMALL_WORDS)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [each["rank"] for each in said["ranks"]] == [0, 1]
    for rank in said["ranks"]:
        by_name = {line["what"]: line for line in rank["lines"]}
        assert by_name["gradients, after backward"]["residual"] == 0
        assert by_name["reduce-scatter over fsdp, backward"]["traced"] > 0
        assert all(line["holds"] for line in rank["lines"])
        held = rank["at_peak"]
        assert sum(held.values()) == by_name["all tensors, peak of the step"]["traced"]
        assert held["activations_and_buffers"] > 0
    assert set(said["flops_per_token"]) == {"full_attention", "all_parameters", "causal"}


def test_a_layout_that_nobody_can_run_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["llama_debug", "--nproc", "2", "--parallel.tp", "3"])
    said = capsys.readouterr().err
    assert end.value.code == 1 and said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "0"], "world_size=0 must be from 1 to 131,072"),
        (["--world-size", "99999999999"], "must be from 1 to 131,072"),
        (["--world-size", "4", "--rank", "4"], "rank=4 must be from 0 to 3"),
        (["--world-size", "4", "--nproc", "2"], "nproc=2 is for a real step"),
        (["--rank", "3"], "say --world-size too"),
        (["--devices", "4"], "devices=4 is for data_parallel='dp'"),
        (["--devices", "4", "--parallel.data-parallel", "dp"], "devices=4 is for a job that does not run"),
        (["--nproc", "0"], "nproc=0 must be at least 1"),
        (["--limit-s", "nan"], "limit_s=nan must be more than 0 s"),
    ],
)
def test_a_number_out_of_range_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["llama_debug", *words])
    assert end.value.code == 1 and message in capsys.readouterr().err


def test_a_promise_is_broken_by_one_byte_or_by_more_than_its_share() -> None:
    exact = Line(what="gradients", predicted=1000, traced=1001, promise=0.0)
    near = Line(what="peak", predicted=1000, traced=1029, promise=0.03)
    far = Line(what="peak", predicted=1000, traced=1040, promise=0.03)
    unknown = Line(what="peak", predicted=None, traced=1000, promise=0.03)
    assert [each.holds for each in (exact, near, far, unknown)] == [False, True, False, True]


def dry(recipe: Recipe, world_size: int, rank: int, optimizer: str = "adamw") -> Any:
    """Whether a dry run holds what it promises, and what it shows."""
    dist.destroy_process_group()
    ledger = dry_ledger(recipe, world_size, rank, optimizer)
    own = lines(ledger.predicted, ledger.traced) if ledger.traced is not None else ()
    return all(line.holds for line in own), [line.what for line in own], ledger.why_not, ledger.built.parameter_bytes


def test_a_rank_of_a_thousand_is_predicted_and_traced_alike() -> None:
    recipe = small({"tp": 2, "precision": BF16}, global_batch=1024)
    ((holds, what, why_not, parameter_bytes),) = run_ranks(1, dry, recipe, 1024, 37)
    assert (holds, why_not) == (True, None)
    assert "all tensors, peak of the step" in what
    assert 0 < parameter_bytes < 4 * recipe.model.num_parameters / 64


@pytest.mark.parametrize(("optimizer", "kernels"), [("adamw", "foreach"), ("adagrad", "foreach"), ("sgd", "loop")])
def test_a_step_of_another_optimizer_or_kernel_is_predicted(optimizer: str, kernels: Any) -> None:
    recipe = small({})
    # So few tokens that the optimizer's step holds most.
    data = dataclasses.replace(recipe.data, sequence_length=8)
    recipe = dataclasses.replace(recipe, data=data, optimizer=OptimizerConfig(implementation=kernels))
    ((holds, what, _, _),) = run_ranks(1, dry, recipe, 2, 0, optimizer)
    assert holds
    assert ("optimizer state, rest" in what) == (optimizer != "sgd")


def test_what_has_no_step_without_values_says_why_and_is_predicted() -> None:
    assert check_fake(small({"data_parallel": "dp"}), num_devices=4) is not None
    ((_, what, why_not, _),) = run_ranks(1, dry, small({"compile": True}), 4, 1)
    assert what == []
    assert "the compiler takes no part" in why_not


# 70B on 1,024 ranks and 405B on 8,192 take one and two minutes, so they are measured by hand.
LIMITS = [("llama_3_1_8b", 1024, 37, 60)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size", "rank", "limit_s"), LIMITS)
def test_a_large_model_is_traced_within_its_time_and_memory(
    name: str, world_size: int, rank: int, limit_s: int
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.monotonic()
    done = run(name, "--world-size", str(world_size), "--rank", str(rank), "--json")
    took_s = time.monotonic() - start_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert all(line["holds"] for line in said["lines"])
    assert said["num_collectives"] > 100
    # Other load on the machine takes none of the process's own time.
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s < limit_s and took_s < 2 * limit_s
    assert after.ru_maxrss * 1024 < 4 * GIB
