"""Whatever the planner accepts, `parallelize` builds and ranks train."""

import dataclasses
import random
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.llama import LlamaConfig
from models.moe import MoeConfig
from models.registry import family_of
from parallel import Batch, ParallelConfig, build_mesh, materialize, parallelize
from parallel.planner.candidate import Candidate, Request
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import KEEP_ALL, KEEP_HALF, model_costs
from parallel.planner.enumeration import legal_degrees
from parallel.planner.memory import predict_memory
from parallel.replicas import local_part
from recipes.dry_run import fake_world
from tests.parallel.planner.requests import PROCESSOR, random_candidates
from tests.ranks import run_ranks

DEBUG = LlamaConfig.preset("debug")
TIED = dataclasses.replace(DEBUG, tied_embeddings=True, num_layers=8)
EXPERTS = MoeConfig.preset("debug")
LENGTH = 64


def asked_for(model: ModelConfig, gpus: int, **fields: Any) -> Request:
    fixed: dict[str, Any] = {"gpu": PROCESSOR, "sequence_length": LENGTH, "global_batch": 16, "compile": False}
    return Request(shape=model.shape, num_gpus=gpus, **fixed | fields)


def build(model: ModelConfig, config: ParallelConfig, world_size: int, rank: int) -> int:
    """Parameters of one of many ranks."""
    family = family_of(model)
    with fake_world(world_size, rank):
        with torch.device("meta"):
            whole = family.build(model)
        trained = parallelize(whole, build_mesh(config, "cpu"), config, family.plan(model))
        return len(trained.named_parameters())


def build_some(count: int, seed: int) -> None:
    """Builds candidates of every model and number of ranks, as many of each."""
    generator = random.Random(seed)
    kinds = [(model, gpus) for model in (DEBUG, TIED, EXPERTS) for gpus in (1, 2, 4, 8)]
    for number in range(count):
        model, gpus = kinds[number % len(kinds)]
        asked = asked_for(
            model, gpus, compute=generator.choice(("stored", "bfloat16")), compile=generator.random() < 0.3
        )
        layout = random_candidates(asked, generator, 1)[0].layout()
        assert build(model, layout, gpus, generator.randrange(gpus)) > 0, layout


def test_12_random_plans_build() -> None:
    build_some(12, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_200_random_plans_within_8_ranks_build(seed: int) -> None:
    build_some(50, seed)


def take_steps(model: ModelConfig, candidates: list[Candidate]) -> list[float]:
    """One step of each layout on this rank; their losses."""
    family, losses = family_of(model), []
    for candidate in candidates:
        config = candidate.layout()
        mesh = build_mesh(config, "cpu")
        with torch.device("meta"):
            whole = family.build(model)
        trained = parallelize(whole, mesh, config, family.plan(model))
        materialize(trained, seed=0)
        tokens = torch.randint(0, 200, (16, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        mine = tokens.chunk(mesh.degree("dp"))[mesh.coordinate("dp")].split(candidate.micro_batch)
        batches = [Batch.from_tokens(each[:, :-1], labels=each[:, 1:]) for each in mine]
        losses.append(float(trained.forward_backward(batches).loss))
    return losses


def shapes(generator: random.Random, count: int) -> list[LlamaConfig]:
    """Small models whose counts divide in few ways."""
    found = []
    for _ in range(count):
        kv = generator.choice((1, 2, 3, 4))
        heads = kv * generator.choice((1, 2, 3))
        found.append(
            LlamaConfig(
                num_layers=generator.choice((1, 2, 3, 5)),
                width=8 * heads,
                num_heads=heads,
                num_kv_heads=kv,
                feed_forward_width=generator.choice((24, 36, 40)),
                vocab_size=generator.choice((201, 256, 260)),
                tied_embeddings=generator.random() < 0.3,
            )
        )
    return found


def train_some(count: int, world_size: int, seed: int) -> None:
    generator = random.Random(seed)
    for model in shapes(generator, count):
        asked = asked_for(model, world_size, compute="stored")
        if not legal_degrees(asked):
            continue
        candidates = random_candidates(asked, generator, 3)
        alone = run_ranks(1, take_steps, model, [_alone(asked)])[0][0]
        for found in run_ranks(world_size, take_steps, model, candidates):
            assert found == pytest.approx([alone] * len(candidates), rel=1e-4), [each.layout() for each in candidates]


def _alone(asked: Request) -> Candidate:
    config = ParallelConfig(data_parallel="none", dp_shard=1)
    return Candidate(config, KEEP_ALL, "last", asked.global_batch, 1)


def test_random_heads_layers_and_degrees_that_are_accepted_train_as_one_process_does() -> None:
    train_some(1, world_size=2, seed=0)


def test_gathered_keys_train_under_selective_checkpointing() -> None:
    config = ParallelConfig(dp_shard=1, cp=2, cp_method="allgather")
    candidates = [Candidate(config, each, "every_micro_batch", 16, 1) for each in (KEEP_ALL, KEEP_HALF)]
    kept, again = run_ranks(2, take_steps, DEBUG, candidates)[0]
    assert kept == pytest.approx(again, rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_many_random_models_and_degrees_that_are_accepted_train_as_one_process_does(seed: int) -> None:
    train_some(5, world_size=4, seed=seed)


UNEVEN = LlamaConfig(
    num_layers=4, width=96, num_heads=8, num_kv_heads=4, feed_forward_width=256, vocab_size=515, head_dim=12
)
LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"dp_shard": 2}),
    (4, {"dp_shard": 4}),
    (4, {"dp_replicate": 2, "dp_shard": 2, "strategy": "hybrid_shard"}),
    (4, {"dp_shard": 2, "tp": 2}),
    (2, {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}),
    (4, {"dp_replicate": 4, "dp_shard": 1, "data_parallel": "zero1"}),
)


def hold_states(model: LlamaConfig, configs: list[ParallelConfig]) -> list[tuple[int, ...]]:
    """Bytes of parameters, gradients and optimizer state on this rank after a step, for each layout."""
    family, held = family_of(model), []
    for config in configs:
        mesh = build_mesh(config, "cpu")
        with torch.device("meta"):
            whole = family.build(model)
        trained = parallelize(whole, mesh, config, family.plan(model))
        materialize(trained, seed=0)
        optimizer = trained.build_optimizer(lambda named: torch.optim.AdamW(named.values()))
        tokens = torch.randint(0, 200, (2, 33))
        trained.forward_backward([Batch.from_tokens(tokens[:, :-1], labels=tokens[:, 1:])])
        optimizer.step()
        parameters = list(trained.named_parameters().values())
        gradients = [each.grad for each in parameters if each.grad is not None]
        moments = [each for state in optimizer.state.values() for each in state.values() if each.dim() > 0]
        held.append(tuple(sum(local_part(each).nbytes for each in kind) for kind in (parameters, gradients, moments)))
    return held


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_states_of_every_rank_are_within_1_percent_of_the_estimate(ranks: int, tied: bool) -> None:
    model = dataclasses.replace(UNEVEN, tied_embeddings=tied)
    configs = [ParallelConfig(**fields) for count, fields in LAYOUTS if count == ranks]
    for found in run_ranks(ranks, hold_states, model, configs):
        for config, held in zip(configs, found, strict=True):
            candidate = Candidate(config, KEEP_ALL, "every_micro_batch", 2, 1)
            memory = predict_memory(model_costs(model.shape), candidate, 32, CONSTANTS)
            shards = 1 if config.resolved_strategy == "no_shard" else config.dp_shard
            gradients = 4 * model.num_parameters / shards / config.tp
            expected = (memory.parameters, gradients, memory.optimizer_state)
            assert held == pytest.approx(expected, rel=0.01), config


def test_states_in_host_memory_are_counted_there_and_not_on_the_gpu() -> None:
    costs = model_costs(DEBUG.shape)
    plans = random_candidates(asked_for(DEBUG, 4, compute="bfloat16"), random.Random(0), 60)
    offloaded = [each for each in plans if each.config.sharding.cpu_offload and each.config.pp == 1]
    assert offloaded
    for candidate in offloaded:
        memory = predict_memory(costs, candidate, LENGTH, CONSTANTS)
        assert (memory.parameters, memory.optimizer_state) == (0.0, 0.0)
        shards = candidate.config.dp_shard * candidate.config.cp
        assert memory.host == pytest.approx(16 * costs.total / shards / candidate.config.tp, rel=0.01)
