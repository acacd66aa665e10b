"""Every collective of a step equals what the ledger predicts, to the byte, over layouts, models and precisions."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.plan import llama_plan
from models.moe import Moe, MoeConfig, moe_plan
from parallel import Buckets, CollectiveCounter, ParallelConfig, Precision, Sharding, Trained
from parallel.layout import resolve
from parallel.ledger.parts import model_parts
from parallel.ledger.term import Term, Traffic, counted_traffic, traffic
from parallel.ledger.textbook import traffic_form
from parallel.ledger.traffic import StepShape, predict_traffic
from parallel.ledger.wire import central_gather_bytes, ring_bytes
from parallel.traits import TRAITS
from tests.models.moe import small_moe
from tests.parallel.small_model import adamw, batches, build
from tests.ranks import run_ranks

BF16 = Precision(compute="bfloat16", reduce="float32")
MODEL = LlamaConfig(num_layers=2)
P = MODEL.num_parameters * 4


def whole(config: LlamaConfig, frozen: tuple[str, ...] = ()) -> Llama:
    with torch.device("meta"):
        model = Llama(config)
    for fqn in frozen:
        model.get_parameter(fqn).requires_grad_(False)
    return model


def step(trained: Trained, model: nn.Module, num_micro_batches: int) -> tuple[Traffic, tuple[Term, ...]]:
    """What this rank sent in a step of training, and the terms that were predicted before it."""
    mine = batches(trained.mesh, 0, num_micro_batches)
    optimizer = trained.build_optimizer(adamw)
    parts = model_parts(model, trained.config, trained.plan, trained.mesh.coordinate("pp"))
    shape = StepShape(
        num_micro_batches=num_micro_batches,
        num_tokens=sum(each.tokens.numel() for each in mine),
        clips=True,
        num_rows=sum(len(each.tokens) for each in mine),
    )
    predicted = predict_traffic(parts, shape, trained.mesh.coordinate("tp"), trained.mesh.coordinate("fsdp"))
    # In the first three steps DDP agrees on the order of its buckets, in the first one stages agree on their shapes.
    num_warm = 3 if TRAITS[trained.config.data_parallel].has_buckets else int(trained.config.pp > 1)
    for _ in range(num_warm + 1):
        with CollectiveCounter(trained.mesh) as counter:
            trained.forward_backward(mine)
            trained.clip_gradients(1.0)
            optimizer.step()
    return counted_traffic(counter.records), predicted


def both(fields: dict[str, Any], model: dict[str, Any], num_micro_batches: int, frozen: tuple[str, ...]) -> Any:
    config = LlamaConfig(**{"num_layers": 2, **model})
    trained = build(ParallelConfig(**fields), config, dtype=torch.float32, frozen=frozen)
    return step(trained, whole(config, frozen), num_micro_batches)


FSDP1 = {"data_parallel": "fsdp1"}
CP = {"cp": 2}
PP = {"pp": 2, "schedule": "1f1b"}
ODD = {"vocab_size": 261}
LAST = Sharding(keep_last_unit=True)
HYBRID = {"dp_replicate": 2, "strategy": "hybrid_shard"}
# Ranks, layout, model, micro-batches.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "full_shard": (2, {}, {}, 1),
    "full_shard with rows that do not divide": (3, {}, {}, 1),
    "full_shard in bf16, accumulating": (2, {"precision": BF16}, {}, 2),
    "full_shard in bf16 all through": (2, {"precision": Precision(compute="bfloat16")}, {}, 1),
    "full_shard, reduced last": (2, {"reduce_gradients": "last"}, {}, 3),
    "full_shard, tied embeddings in the root": (2, {}, {"tied_embeddings": True}, 1),
    "full_shard, last unit kept": (2, {"sharding": Sharding(keep_last_unit=True)}, {}, 1),
    "full_shard, one unit": (2, {"sharding": Sharding(units="model")}, {}, 1),
    "full_shard, units by size": (2, {"sharding": Sharding(units="size", unit_min_parameters=5000)}, {}, 1),
    "full_shard, resharding to pairs": (4, {"sharding": Sharding(reshard_group=2)}, {}, 1),
    "full_shard, prefetch": (2, {"sharding": Sharding(forward_prefetch=1, backward_prefetch=2)}, {}, 1),
    "shard_grad_op": (2, {"strategy": "shard_grad_op", "precision": BF16}, {}, 2),
    "hybrid_shard": (4, HYBRID | {"precision": BF16}, {}, 1),
    "hybrid_shard_zero2": (4, HYBRID | {"strategy": "hybrid_shard_zero2"}, {}, 2),
    "hybrid_shard of one rank a group": (2, HYBRID, {}, 1),
    "no_shard": (2, {"strategy": "no_shard", "precision": BF16}, {}, 2),
    "ddp": (3, {"data_parallel": "ddp"}, {}, 2),
    "ddp in bf16 with small buckets": (
        2,
        {"data_parallel": "ddp", "precision": BF16, "buckets": Buckets(bucket_cap_mb=0.05)},
        {},
        1,
    ),
    "ddp that sums in bf16": (2, {"data_parallel": "ddp", "precision": Precision(reduce="bfloat16")}, {}, 1),
    "ddp that looks for unused parameters": (
        2,
        {"data_parallel": "ddp", "buckets": Buckets(find_unused_parameters=True)},
        {},
        1,
    ),
    "ddp with a static graph": (2, {"data_parallel": "ddp", "buckets": Buckets(static_graph=True)}, {}, 1),
    "zero1": (3, {"data_parallel": "zero1"}, {}, 2),
    "tp": (2, {"tp": 2}, {"attention_bias": True}, 2),
    "tp in bf16, normalized heads": (2, {"tp": 2, "precision": BF16}, {"qk_norm": True}, 2),
    "tp, tied embeddings": (2, {"tp": 2}, {"tied_embeddings": True}, 1),
    "tp, gathered logits of a vocabulary that does not divide": (
        2,
        {"tp": 2, "loss_parallel": False, "precision": BF16},
        {"vocab_size": 261},
        1,
    ),
    "tp without sequence parallel": (2, {"tp": 2, "sequence_parallel": False}, {"qk_norm": True}, 1),
    "tp in bf16, reduced last": (2, {"tp": 2, "precision": BF16, "reduce_gradients": "last"}, {}, 3),
    "tp, recomputed": (2, {"tp": 2, "activation_checkpointing": "full"}, {}, 1),
    "tp, every second block recomputed without sequence parallel": (
        2,
        {
            "tp": 2,
            "activation_checkpointing": "full",
            "activation_checkpoint_every": 2,
            "sequence_parallel": False,
        },
        {"num_layers": 3},
        1,
    ),
    "tp, selectively recomputed": (2, {"tp": 2, "activation_checkpointing": "selective"}, {}, 1),
    "full_shard x tp": (4, {"dp_shard": 2, "tp": 2, "precision": BF16}, {"vocab_size": 261}, 2),
    "ddp x tp": (4, {"data_parallel": "ddp", "tp": 2}, {}, 2),
    "no_shard x tp": (4, {"strategy": "no_shard", "tp": 2}, {}, 1),
    "fsdp1 with padding": (3, FSDP1, {"vocab_size": 261}, 1),
    "fsdp1 in bf16, last unit kept": (2, FSDP1 | {"precision": BF16, "sharding": LAST}, {"vocab_size": 261}, 2),
    "fsdp1 shard_grad_op": (2, FSDP1 | {"strategy": "shard_grad_op", "precision": BF16}, {}, 2),
    "fsdp1 hybrid_shard": (4, FSDP1 | HYBRID, {"vocab_size": 261}, 1),
    "fsdp1 hybrid_shard_zero2": (4, FSDP1 | HYBRID | {"strategy": "hybrid_shard_zero2"}, {}, 2),
    "fsdp1 no_shard": (2, FSDP1 | {"strategy": "no_shard", "precision": BF16}, {"vocab_size": 261}, 2),
    "fsdp1 x tp": (4, FSDP1 | {"dp_shard": 2, "tp": 2}, {"vocab_size": 261}, 1),
    "cp by all-gather": (2, CP | {"cp_method": "allgather"}, {}, 2),
    "cp by a ring in bf16": (2, CP | {"cp_method": "ring", "precision": BF16}, {}, 2),
    "cp by ulysses, key-value heads repeated": (2, CP | {"cp_method": "ulysses"}, {"num_kv_heads": 1}, 1),
    "cp by all-gather, recomputed": (2, CP | {"cp_method": "allgather", "activation_checkpointing": "full"}, {}, 1),
    "cp by a ring, recomputed": (2, CP | {"cp_method": "ring", "activation_checkpointing": "selective"}, {}, 1),
    "cp by ulysses, recomputed": (2, CP | {"cp_method": "ulysses", "activation_checkpointing": "selective"}, {}, 1),
    "no_shard x cp": (2, CP | {"cp_method": "ring", "strategy": "no_shard"}, {}, 1),
    "zero1 x cp": (2, CP | {"cp_method": "ring", "data_parallel": "zero1"}, {}, 1),
    "full_shard x cp, a ring of 4": (4, {"cp": 4, "cp_method": "ring"}, {}, 1),
    "cp x tp": (4, CP | {"cp_method": "ulysses", "tp": 2}, {}, 1),
    "one process": (1, {"data_parallel": "none"}, {}, 2),
    "pp": (2, PP, {}, 2),
    "pp, tied embeddings, rows that do not divide": (4, PP | {"precision": BF16}, ODD | {"tied_embeddings": True}, 2),
    "pp with gpipe x tp": (4, PP | {"schedule": "gpipe", "tp": 2, "precision": BF16}, {}, 3),
    "pp x cp": (4, PP | CP | {"cp_method": "ulysses"}, {}, 2),
    "pp x ddp": (4, PP | {"data_parallel": "ddp"}, {}, 2),
    "pp, interleaved": (2, PP | {"schedule": "interleaved_1f1b"}, {"num_layers": 4}, 2),
    "pp, a V with split backwards": (2, PP | {"schedule": "zbv_zero_bubble"}, {"num_layers": 4}, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_predicted_payloads_equal_the_counted_ones(name: str) -> None:
    world_size, fields, model, num_micro_batches = CASES[name]
    for counted, terms in run_ranks(world_size, both, fields, model, num_micro_batches, ()):
        assert traffic(terms) == counted


BIASED = small_moe.MODELS["sigmoid, loss, bias, shared, dense"]


def of_experts(fields: dict[str, Any], model: dict[str, Any]) -> Any:
    trained = small_moe.build(ParallelConfig(**fields), model, dtype=torch.float32)
    with torch.device("meta"):
        whole_model = Moe(MoeConfig(**{"num_layers": 2, **model}))
    return step(trained, whole_model, 2)


@pytest.mark.parametrize(
    ("fields", "model"),
    [({}, BIASED), ({"data_parallel": "ddp"}, BIASED), (FSDP1, BIASED)],
    ids=["fsdp2", "ddp", "fsdp1"],
)
def test_what_ranks_tell_each_other_of_experts_is_predicted_too(fields: dict[str, Any], model: dict[str, Any]) -> None:
    for counted, terms in run_ranks(2, of_experts, fields, model):
        # Two of three layers have experts.
        assert [term.payload_bytes for term in terms if term.name == "expert load"] == [2 * MoeConfig().num_experts * 8]
        assert traffic(terms) == counted


FAST_EP_CASES = ("ep 2 x expert_fsdp 2", "ep x tp", "one expert on two ranks")
EP_CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ep 2 x expert_fsdp 2": (4, {"ep": 2}, BIASED),
    "ep that is all of fsdp, reduced last": (2, {"ep": 2, "reduce_gradients": "last"}, BIASED),
    "ep that is cp, in bf16": (4, {"cp": 2, "cp_method": "allgather", "ep": 2, "precision": BF16}, BIASED),
    "cp that drops, recomputed": (
        2,
        {"cp": 2, "cp_method": "ring", "activation_checkpointing": "full"},
        BIASED | {"capacity_factor": 0.8},
    ),
    "hybrid_shard x ep": (4, HYBRID | {"ep": 2}, BIASED),
    "ep x tp": (4, {"dp_shard": 2, "tp": 2, "ep": 2, "precision": BF16}, BIASED),
    "ep x tp without sequence parallel": (4, {"dp_shard": 2, "tp": 2, "ep": 2, "sequence_parallel": False}, BIASED),
    "tp alone": (2, {"tp": 2}, BIASED),
    "shard_grad_op, recomputed": (
        4,
        {"ep": 2, "strategy": "shard_grad_op", "activation_checkpointing": "full"},
        BIASED,
    ),
    "ep x tp, selectively recomputed": (
        4,
        {"dp_shard": 2, "tp": 2, "ep": 2, "activation_checkpointing": "selective"},
        {},
    ),
    "one expert on two ranks": (4, {"ep": 2}, {"num_experts": 2, "num_experts_per_token": 1}),
    "three experts on two ranks": (4, {"ep": 2}, {"num_experts": 6}),
    "others kept by pairs": (4, {"ep": 2, "sharding": Sharding(reshard_group=2)}, BIASED),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST_EP_CASES else [pytest.mark.slow]) for name in EP_CASES],
)
def test_what_experts_send_is_exact_for_the_ranks_that_share_them_together(name: str) -> None:
    world_size, fields, model = EP_CASES[name]
    counted: Traffic = Counter()
    predicted: Traffic = Counter()
    for each, terms in run_ranks(world_size, of_experts, fields, model):
        counted, predicted = counted + each, predicted + traffic(terms)
        if "ep" in fields:
            # Each rank's own rows are known, whoever gets them.
            assert any(term.name == "rows to their experts" for term in terms)
    assert predicted == counted


FROZEN = ("embed.weight", "blocks.0.attention.q_proj.weight", "norm.weight", "head.weight")


@pytest.mark.parametrize("name", ["full_shard", "ddp", "zero1"])
def test_frozen_parameters_are_gathered_and_send_no_gradient(name: str) -> None:
    world_size, fields, model, num_micro_batches = CASES[name]
    for counted, terms in run_ranks(world_size, both, fields, model, num_micro_batches, FROZEN):
        assert traffic(terms) == counted


def wire_bytes(name: str, frozen: tuple[str, ...] = ()) -> tuple[float, float]:
    """What rank 0 sends around rings by the terms that textbooks know, and by their form; nothing is run for that."""
    world_size, fields, model, num_micro_batches = CASES[name]
    model_config = LlamaConfig(**{"num_layers": 2, **model})
    parts = model_parts(
        whole(model_config, frozen), resolve(ParallelConfig(**fields), world_size), llama_plan(model_config)
    )
    known = {"parameters", "parameters again", "gradients", "gradients over replicas", "updated rows"}
    terms = predict_traffic(parts, StepShape(num_micro_batches=num_micro_batches, num_tokens=64, clips=True))
    sent = (
        ring_bytes(each.channel.kind, each.payload_bytes, each.channel.ranks) for each in terms if each.name in known
    )
    return sum(sent), traffic_form(parts).num_bytes


@pytest.mark.parametrize(
    ("name", "ideal"),
    [
        ("ddp", 2 * P * 2 / 3),
        ("zero1", 3 * P * 2 / 3),
        ("full_shard", 3 * P / 2),
        ("shard_grad_op", 2 * P / 2),
        # Within a group of 2 as full_shard, and each rank's half over 2 replicas.
        ("hybrid_shard", 3 * P / 2 + 2 * (P / 2) / 2),
        ("hybrid_shard_zero2", 2 * P / 2 + 2 * (P / 2) / 2),
        ("no_shard", 2 * P / 2),
        # Ranks of cp replicate what is not sharded.
        ("no_shard x cp", 2 * P / 2),
        ("zero1 x cp", 3 * P / 2),
    ],
)
def test_the_terms_that_textbooks_know_add_up_to_their_figures(name: str, ideal: float) -> None:
    assert wire_bytes(name) == pytest.approx((ideal, ideal), rel=1e-12)


@pytest.mark.parametrize("name", ["ddp", "zero1", "full_shard", "shard_grad_op", "hybrid_shard"])
def test_forms_of_traffic_count_gradients_of_trained_parameters_alone(name: str) -> None:
    sent, formed = wire_bytes(name, FROZEN)
    assert sent == pytest.approx(formed, rel=1e-12) and formed < wire_bytes(name)[1]


def test_experts_that_ranks_share_are_gathered_from_fewer_of_them() -> None:
    config = ParallelConfig(dp_shard=8, ep=2)
    model_config = MoeConfig(num_layers=2)
    with torch.device("meta"):
        parts = model_parts(Moe(model_config), config, moe_plan(model_config))
    experts = 2 * 3 * model_config.num_experts * model_config.width * model_config.expert_width
    form = traffic_form(parts)
    assert form.text == "12(P-E)(N-1)/N + 12(E/e)(N/e-1)/(N/e)"
    others = model_config.num_parameters - experts
    assert form.num_bytes == pytest.approx(12 * (others * 7 / 8 + experts / 2 * 3 / 4), rel=1e-12)
    terms = predict_traffic(parts, StepShape(num_micro_batches=1, num_tokens=64, clips=True))
    known = {"parameters", "parameters again", "gradients"}
    sent = [
        ring_bytes(each.channel.kind, each.payload_bytes, each.channel.ranks) for each in terms if each.name in known
    ]
    assert sum(sent) == pytest.approx(form.num_bytes, rel=1e-12)


def test_a_central_gather_grows_with_the_ranks_where_a_ring_does_not() -> None:
    assert [central_gather_bytes(P, ranks) / P for ranks in (2, 4, 8)] == [2, 6, 14]
    assert [ring_bytes("all_reduce", P, ranks) / P for ranks in (2, 4, 8)] == [1, 1.5, 1.75]
