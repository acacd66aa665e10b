"""Stages of a pipeline together compute what one process computes."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import parallel.compile
from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.plan import llama_plan
from parallel import Batch, CollectiveCounter, ParallelConfig, Sharding, build_mesh, parallelize
from tests.parallel.small_model import (
    CONFIG,
    GLOBAL_BATCH,
    SEQUENCE_LENGTH,
    Run,
    adamw,
    batches,
    build,
    difference,
    sgd,
    whole_parameters,
)
from tests.ranks import run_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v")
TOLERANCE = {adamw: 1e-12, sgd: 1e-13}


def train(config: ParallelConfig, factory: Callable[..., Any], model: dict[str, Any], num_micro_batches: int) -> Run:
    """Five steps with uneven numbers of valid tokens, clipped, and this rank's parameters."""
    parallel.compile.BACKEND = "aot_eager"
    trained = build(config, LlamaConfig(**model))
    optimizer = trained.build_optimizer(factory)
    losses, norms = [], []
    for step in range(5):
        losses.append(trained.forward_backward(batches(trained.mesh, step, num_micro_batches)).loss)
        norms.append(trained.clip_gradients(0.05).item())
        optimizer.step()
    losses.append(trained.evaluate(batches(trained.mesh, 7, 2)).loss)
    return Run(losses, norms, whole_parameters(trained))


@cache
def one_process(factory: Callable[..., Any], num_layers: int, tied: bool) -> Run:
    """The numbers to reach."""
    model = {"num_layers": num_layers, "tied_embeddings": tied}
    run: Run = run_ranks(1, train, ParallelConfig(data_parallel="none"), factory, model, 1)[0]
    return run


def assert_parity(
    world_size: int,
    layout: dict[str, Any],
    *,
    factory: Callable[..., Any] = sgd,
    num_layers: int = 4,
    tied: bool = False,
    num_micro_batches: int = 4,
) -> None:
    reference, tolerance = one_process(factory, num_layers, tied), TOLERANCE[factory]
    model = {"num_layers": num_layers, "tied_embeddings": tied}
    runs: list[Run] = run_ranks(world_size, train, ParallelConfig(**layout), factory, model, num_micro_batches)
    held = set().union(*(run.parameters for run in runs))
    assert held == reference.parameters.keys()
    assert all((run.losses, run.norms) == (runs[0].losses, runs[0].norms) for run in runs)
    assert difference(runs[0].losses, reference.losses) < tolerance
    assert difference(runs[0].norms, reference.norms) < tolerance
    for run in runs:
        worst = {fqn: difference(values, reference.parameters[fqn]) for fqn, values in run.parameters.items()}
        assert max(worst.values()) < tolerance, worst


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("tied", "factory"), [(False, sgd), (True, adamw)], ids=["untied, sgd", "tied, adamw"])
def test_every_schedule_on_two_ranks_equals_one_process(schedule: str, tied: bool, factory: Callable[..., Any]) -> None:
    assert_parity(2, {"pp": 2, "schedule": schedule}, tied=tied, factory=factory)


COMPOSED: dict[str, tuple[int, dict[str, Any], int, bool]] = {
    # Ranks, layout, layers, whether embeddings are tied
    "pp-4, gpipe": (4, {"pp": 4, "schedule": "gpipe"}, 8, False),
    "pp-4, 1f1b, tied": (4, {"pp": 4, "schedule": "1f1b"}, 8, True),
    "pp-4, interleaved": (4, {"pp": 4, "schedule": "interleaved_1f1b"}, 8, False),
    "pp-4, zero bubble": (4, {"pp": 4, "schedule": "interleaved_zero_bubble"}, 8, False),
    "pp-4, v, tied": (4, {"pp": 4, "schedule": "zbv_zero_bubble"}, 8, True),
    "pp-4, dual": (4, {"pp": 4, "schedule": "dual_pipe_v"}, 8, False),
    "pp-2, three stages a rank": (2, {"pp": 2, "schedule": "interleaved_1f1b", "stages": (1, 1, 2, 1, 2, 1)}, 8, False),
    "pp-2, by hand": (2, {"pp": 2, "schedule": "gpipe", "stages": (3, 1)}, 4, False),
    "pp-2, zero bubble, recomputed": (
        2,
        {"pp": 2, "schedule": "interleaved_zero_bubble", "activation_checkpointing": "full"},
        4,
        False,
    ),
    "pp-2, some recomputed": (
        2,
        {"pp": 2, "schedule": "interleaved_1f1b", "activation_checkpointing": "selective"},
        4,
        False,
    ),
    "pp-2, compiled": (2, {"pp": 2, "schedule": "interleaved_1f1b", "compile": True}, 4, False),
    "pp-2 x full_shard-2, tied": (4, {"pp": 2, "schedule": "1f1b", "dp_shard": 2}, 4, True),
    "pp-2 x full_shard-2, v, tied": (4, {"pp": 2, "schedule": "zbv_zero_bubble", "dp_shard": 2}, 4, True),
    "pp-2 x full_shard-2, zero bubble": (4, {"pp": 2, "schedule": "interleaved_zero_bubble", "dp_shard": 2}, 4, False),
    "pp-2 x full_shard-2, by size": (
        4,
        {
            "pp": 2,
            "schedule": "1f1b",
            "dp_shard": 2,
            "sharding": Sharding(units="size", unit_min_parameters=5000, forward_prefetch=1, backward_prefetch=1),
        },
        4,
        False,
    ),
    "pp-2 x shard_grad_op-2": (4, {"pp": 2, "schedule": "gpipe", "dp_shard": 2, "strategy": "shard_grad_op"}, 4, False),
    "pp-2 x no_shard-2": (4, {"pp": 2, "schedule": "1f1b", "dp_replicate": 2, "strategy": "no_shard"}, 4, False),
    "pp-2 x ddp-2, dual, tied": (
        4,
        {"pp": 2, "schedule": "dual_pipe_v", "dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"},
        4,
        True,
    ),
    "pp-2 x tp-2, tied": (4, {"pp": 2, "schedule": "1f1b", "tp": 2}, 4, True),
    "pp-2 x tp-2, zero bubble": (4, {"pp": 2, "schedule": "interleaved_zero_bubble", "tp": 2}, 4, False),
    "pp-2 x tp-2 without sequence parallel": (
        4,
        {"pp": 2, "schedule": "interleaved_1f1b", "tp": 2, "sequence_parallel": False, "loss_parallel": False},
        4,
        False,
    ),
    "pp-2 x cp-2": (4, {"pp": 2, "schedule": "interleaved_1f1b", "cp": 2, "cp_method": "ulysses"}, 4, False),
    "pp-2 x full_shard-2 x tp-2": (8, {"pp": 2, "schedule": "1f1b", "dp_shard": 2, "tp": 2}, 4, True),
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if each[0] == 8 else []) for name, each in COMPOSED.items()],
)
def test_stages_compose_with_the_other_axes(layout: str) -> None:
    world_size, fields, num_layers, tied = COMPOSED[layout]
    num_micro_batches = 8 if fields["pp"] == 4 else 4
    assert_parity(world_size, fields, num_layers=num_layers, tied=tied, num_micro_batches=num_micro_batches)


HIDDEN_BYTES = GLOBAL_BATCH // 4 * SEQUENCE_LENGTH * CONFIG.width * 8
EMBED_BYTES = CONFIG.vocab_size * CONFIG.width * 8


def count(layout: dict[str, Any], model: dict[str, Any], num_micro_batches: int) -> Counter[tuple[str, str, int]]:
    """What the second step sends: the first one also has torch agree on shapes."""
    trained = build(ParallelConfig(**layout), LlamaConfig(**model))
    trained.forward_backward(batches(trained.mesh, 0, num_micro_batches))
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(batches(trained.mesh, 1, num_micro_batches))
    return Counter((each.kind, each.view, each.payload_bytes) for each in counter.records)


# Of each rank: what it sends and receives of 4 micro-batches, in residual streams or gradients of them.
TRAFFIC: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "gpipe": ((4, 4), (4, 4)),
    "1f1b": ((4, 4), (4, 4)),
    # Three borders between four stages, all of them between ranks.
    "interleaved_1f1b": ((12, 12), (12, 12)),
    "interleaved_zero_bubble": ((12, 12), (12, 12)),
    # The border at the foot of the V lies within a rank.
    "zbv_zero_bubble": ((8, 8), (8, 8)),
    "dual_pipe_v": ((8, 8), (8, 8)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_micro_batch_crosses_each_border_once_either_way(schedule: str) -> None:
    found = run_ranks(2, count, {"pp": 2, "schedule": schedule}, {"num_layers": 4}, 4)
    for figures, (sent, received) in zip(found, TRAFFIC[schedule], strict=True):
        assert figures == Counter(
            {
                ("send", "pp", HIDDEN_BYTES): sent,
                ("recv", "pp", HIDDEN_BYTES): received,
                ("all_reduce", "pp", 16): 1,  # least and most of a hash of the micro-batches
                ("broadcast", "pp", 4 * 8): 1,  # their losses
            }
        )


def test_tied_parameters_cost_one_exchange_of_their_gradient() -> None:
    tied = run_ranks(2, count, {"pp": 2, "schedule": "1f1b"}, {"num_layers": 2, "tied_embeddings": True}, 4)
    for figures in tied:
        assert figures["send", "pp", EMBED_BYTES] == figures["recv", "pp", EMBED_BYTES] == 1


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_a_unit_is_gathered_once_a_step_and_its_gradient_reduced_once(schedule: str) -> None:
    """Of four micro-batches: embedding, four blocks, head and the norm before it."""
    found = run_ranks(4, count, {"pp": 2, "schedule": schedule, "dp_shard": 2}, {"num_layers": 4}, 4)
    for kind in ("all_gather", "reduce_scatter"):
        of_rank = [
            sum(n for (each, view, _), n in figures.items() if (each, view) == (kind, "fsdp")) for figures in found
        ]
        assert of_rank[0] == of_rank[1] and of_rank[2] == of_rank[3]
        assert of_rank[0] + of_rank[2] == 1 + 4 + 1 + 1


def logits_of(layout: dict[str, Any], model: dict[str, Any]) -> tuple[Tensor, Tensor]:
    trained = build(ParallelConfig(**layout), LlamaConfig(**model))
    tokens = batches(trained.mesh, 0)[0].tokens[:2, :7]
    with torch.no_grad():
        return trained.logits(tokens), trained.logits(tokens[:, :3])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_every_rank_has_the_logits_of_one_process(schedule: str) -> None:
    model = {"num_layers": 4, "tied_embeddings": True}
    (expected,) = run_ranks(1, logits_of, {"data_parallel": "none"}, model)
    for found in run_ranks(2, logits_of, {"pp": 2, "schedule": schedule}, model):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def refusals() -> list[str]:
    trained = build(ParallelConfig(pp=2, schedule="1f1b"))
    messages = []
    whole = batches(trained.mesh, 0, 4)
    other = Batch.from_tokens(whole[0].tokens[:, :16], whole[0].labels[:, :16])
    mine = batches(trained.mesh, dist.get_rank(), 4)
    for wrong in (whole[:1], [*whole[:3], other], mine):
        with pytest.raises(ValueError) as caught:
            trained.forward_backward(wrong)
        messages.append(str(caught.value))
    trained.forward_backward(whole)
    return messages


def test_a_step_that_the_schedule_cannot_run_is_refused_on_every_rank() -> None:
    for too_few, unlike, different in run_ranks(2, refusals):
        assert (
            "cannot run 1 micro-batches for pp=2 stages" in too_few and "nearest legal numbers: [2, 3, 4, 5]" in too_few
        )
        assert "must have one shape" in unlike
        assert "have the stages of a pipeline" in different and "need the same batches" in different


def values_of_a_real_model() -> dict[str, Tensor]:
    """Stages of a model that has values already, each built from the whole."""
    torch.manual_seed(0)
    config = ParallelConfig(pp=2, schedule="zbv_zero_bubble")
    model_config = LlamaConfig(num_layers=4, tied_embeddings=True)
    model = Llama(model_config)
    before = {fqn: each.detach().clone() for fqn, each in model.named_parameters()}
    trained = parallelize(model, build_mesh(config), config, llama_plan(model_config))
    now = whole_parameters(trained)
    assert all(torch.equal(each, before[fqn]) for fqn, each in now.items())
    assert len(now) < len(before)
    return now


def test_a_model_with_values_keeps_those_of_its_stages() -> None:
    first, second = run_ranks(2, values_of_a_real_model)
    assert set(first) & set(second) == set()
    assert {"embed.weight", "norm.weight"} <= set(first)
