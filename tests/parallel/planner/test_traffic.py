"""Bytes behind the planner's times against the exact ones of the ledger."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import ParallelConfig, Precision
from parallel.ledger.parts import ModelParts, model_parts
from parallel.ledger.traffic import StepShape, predict_traffic
from parallel.ledger.traffic_of_context_parallel import context_parallel_terms
from parallel.ledger.wire import ring_bytes
from parallel.planner.candidate import PLAIN, Candidate
from parallel.planner.costs import KEEP_ALL, KEEP_HALF, KEEP_INPUT, Recompute, model_costs
from parallel.planner.gathering import Work, data_parallel_s
from parallel.planner.sent import ALL_SENT, with_unit_links
from parallel.planner.states import fullest
from parallel.planner.waiting import context_parallel_s, ends_of_tensor_parallel_s, join_ranks, tensor_parallel_s
from tests.parallel.planner.requests import PROCESSOR

MODEL = LlamaConfig(num_layers=6, width=128, num_heads=8, num_kv_heads=4, feed_forward_width=384, vocab_size=512)
GPU = with_unit_links(PROCESSOR)
TOKENS, TIMES = 256, 2


def parts_of(config: ParallelConfig, recompute: Recompute, frozen: str | None = None) -> ModelParts:
    whole = replace(
        config,
        activation_checkpointing=recompute.checkpointing,
        activation_checkpoint_policy=recompute.policy,
        reduce_gradients=None,
    )
    with torch.device("meta"):
        model = Llama(MODEL)
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in fqn)
    return model_parts(model, whole, llama_plan(MODEL))


def exact_bytes(
    config: ParallelConfig, recompute: Recompute, views: tuple[str, ...], frozen: str | None = None
) -> float:
    """What the ledger says that a rank of a ring sends over some views."""
    parts = parts_of(config, recompute, frozen)
    step = StepShape(num_micro_batches=TIMES, num_tokens=TIMES * TOKENS * config.cp, clips=False)
    return sum(
        ring_bytes(term.channel.kind, term.payload_bytes, term.channel.ranks)
        for term in predict_traffic(parts, step)
        if term.channel.view in views
    )


def planned(config: ParallelConfig, recompute: Recompute = KEEP_ALL) -> Candidate:
    return Candidate(config, recompute, "every_micro_batch", 1, TIMES, PLAIN)


@pytest.mark.parametrize("frozen", [None, "feed_forward."])
@pytest.mark.parametrize(
    "fields",
    [
        {"dp_shard": 4},
        {"dp_shard": 4, "strategy": "shard_grad_op"},
        {"dp_shard": 4, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 2, "strategy": "hybrid_shard"},
        {"dp_replicate": 4, "dp_shard": 1, "data_parallel": "ddp"},
        {"dp_replicate": 4, "dp_shard": 1, "data_parallel": "zero1"},
        {"dp_shard": 4, "data_parallel": "fsdp1"},
        {"dp_shard": 4, "precision": Precision(compute="bfloat16", reduce="float32")},
    ],
    ids=str,
)
def test_parameters_and_gradients_are_close_to_the_ledger(fields: dict[str, Any], frozen: str | None) -> None:
    config = ParallelConfig(**fields)
    parameters = parts_of(config, KEEP_ALL, frozen).parameters
    sizes = {each.fqn: prod(each.shape) for each in parameters}
    still = sum(sizes[each.fqn] for each in parameters if not each.trainable) / sum(sizes.values())
    assert (still > 0.5) == (frozen is not None)
    costs, ranks = model_costs(MODEL.shape, still), join_ranks(config, GPU, ALL_SENT)
    work = Work(fullest(costs, config), 0.0, 0.0)
    sent = data_parallel_s(costs, planned(config), PLAIN, work, ranks, ALL_SENT)
    exact = exact_bytes(config, KEEP_ALL, ("dp_replicate", "dp_shard", "fsdp", "loss"), frozen)
    assert sent == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("recompute", [KEEP_ALL, KEEP_HALF, KEEP_INPUT], ids=lambda each: each.name)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_activations_of_tp_are_within_1_percent_of_the_ledger(recompute: Recompute, sequence_parallel: bool) -> None:
    config = ParallelConfig(dp_shard=1, tp=4, sequence_parallel=sequence_parallel)
    costs, candidate, link = model_costs(MODEL.shape), planned(config, recompute), join_ranks(config, GPU, ALL_SENT).tp
    of_blocks = MODEL.num_layers * tensor_parallel_s(costs, candidate, TOKENS, link)
    sent = of_blocks + ends_of_tensor_parallel_s(costs, candidate, TOKENS, link, embeds=True, has_head=True)
    assert sent == pytest.approx(exact_bytes(config, recompute, ("tp",)) / TIMES, rel=0.01)


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize("recompute", [KEEP_ALL, KEEP_INPUT], ids=lambda each: each.name)
@pytest.mark.parametrize("cp", [4, 8])
def test_what_cp_sends_is_what_the_ledger_says(method: Any, recompute: Recompute, cp: int) -> None:
    config = ParallelConfig(dp_shard=1, cp=cp, cp_method=method, data_parallel="ddp")
    link = join_ranks(config, GPU, ALL_SENT).cp
    sent = context_parallel_s(model_costs(MODEL.shape), planned(config, recompute), TOKENS, link, 0.0, ALL_SENT)
    # A rank of the ring sends all of its payload to the next one, none of it to itself.
    exact = sum(
        term.payload_bytes
        if method == "ring"
        else ring_bytes(term.channel.kind, term.payload_bytes, term.channel.ranks)
        for term in context_parallel_terms(parts_of(config, recompute), TOKENS)
    )
    assert MODEL.num_layers * sent == pytest.approx(exact)
