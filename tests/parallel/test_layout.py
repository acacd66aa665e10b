"""Layouts are accepted or refused before any rank starts, for the reason given."""

from typing import Any

import pytest

from parallel import Buckets, ModelShape, ParallelConfig, Precision, Sharding
from parallel.layout import check_layout, check_sequence_length, resolve
from tests.parallel.layout_rows import DENSE, SEQUENCE_LENGTH, config_of, name_of, rows, shape_of

# What the message of each refusal must name.
REASONS = {
    "the product of degrees is 4, the world has 8 ranks": "multiply to 4, but the world has 8 ranks",
    "the product of degrees is 8, the world has 4 ranks": "multiply to 8, but the world has 4 ranks",
    "dp_shard=-1: 6 ranks are not a multiple of tp=4": "6 ranks are not a multiple",
    "tp=3 divides neither heads nor kv heads": "tp=3 must divide num_heads=8; legal here: \\[1, 2, 4\\]",
    "a degree of 0": "tp=0 must be at least 1",
    "a negative degree other than -1": "dp_shard=-2 must be at least 1",
    "only dp_shard may be -1": "only dp_shard may be -1",
    "hybrid_shard without replicas": "needs dp_replicate > 1",
    "unknown strategy": "unknown strategy 'zero4'; legal: full_shard",
    "unknown backend": "unknown data_parallel 'horovod'; legal: none",
    "DataParallel is one process": "data_parallel='dp' is one process, but {'dp_replicate': 2} ask for more",
    "DataParallel with tensor parallel": "data_parallel='dp' is one process, but {'tp': 2}",
    "FSDP1 with pipeline stages": "fsdp1 does not compose with pp=2; use data_parallel='fsdp2'",
    "FSDP1 with context parallel": "fsdp1 does not compose with cp=2; use data_parallel='fsdp2'",
    "ddp does not shard parameters": "ddp does not shard parameters.*fsdp2",
    "ep on a dense model": "the model is dense",
    "ep=3 does not divide 8 experts": "ep=3 must divide num_experts=8; legal here: \\[1, 2, 4, 8\\]",
    "ep=8 does not divide dp_shard x cp = 4": "ep=8 is carved out of dp_shard x cp = 4 x 1 = 4",
    "more stages than blocks": "needs at least.*8 stages.*4 blocks",
    "1f1b with fewer micro-batches than stages": "2 micro-batches for pp=4",
    "interleaved needs at least 2 virtual stages a rank: 4 blocks on 4 ranks": "at least 2 virtual stages a rank",
    "unknown schedule": "unknown schedule '2f2b'; legal: gpipe",
    "pp > 1 without a schedule": "pp=2 needs a schedule; legal: gpipe",
    "a schedule without pipeline stages": "needs pipeline stages",
    "unknown context-parallel method": "unknown cp_method 'star'; legal: allgather",
    "ulysses splits heads: tp x cp = 16 is more than 8 heads": "tp x cp = 4 x 4 = 16 must divide the model's 8 heads",
    "unknown activation checkpointing": "unknown activation_checkpointing 'some'; legal: none",
}


@pytest.mark.parametrize("row", rows("must_accept"), ids=map(name_of, rows("must_accept")))
def test_a_layout_that_must_train_is_legal(row: dict[str, str]) -> None:
    resolved = resolve(config_of(row), int(row["world_size"]))
    check_layout(resolved, shape_of(row), num_micro_batches=int(row["micro_batches"]))
    check_sequence_length(resolved, SEQUENCE_LENGTH, shape_of(row))


@pytest.mark.parametrize("row", rows("must_refuse"), ids=[row["why"] for row in rows("must_refuse")])
def test_an_illegal_layout_is_refused_for_the_reason_given(row: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=REASONS[row["why"]]):
        resolved = resolve(config_of(row), int(row["world_size"]))
        check_layout(resolved, shape_of(row), num_micro_batches=int(row["micro_batches"]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 2.0}, "tp=2.0 must be an integer"),
        ({"tp": True}, "tp=True must be an integer"),
        ({"compile": "yes"}, "compile='yes' must be true or false"),
        ({"activation_checkpoint_every": 0}, "activation_checkpoint_every=0 must be at least 1"),
        ({"activation_checkpoint_every": 2}, "needs activation_checkpointing 'full' or 'selective'; it is 'none'"),
        (
            {"activation_checkpointing": "full", "activation_checkpoint_policy": "attention"},
            "activation_checkpoint_policy='attention' needs activation_checkpointing 'selective'; it is 'full'",
        ),
        ({"strategy": "shard_grad_op", "dp_replicate": 2}, "use 'hybrid_shard'"),
        (
            {"data_parallel": "ddp", "sharding": Sharding(cpu_offload=True)},
            "cpu_offload=True.* has no meaning for ddp; leave it out, or use fsdp1 or fsdp2",
        ),
        (
            {"buckets": Buckets(bucket_cap_mb=1.0)},
            "bucket_cap_mb=1.0.* has no meaning for fsdp2; leave it out, or use ddp",
        ),
        ({"data_parallel": "ddp", "reduce_gradients": "every_micro_batch"}, "would sum again what it has summed"),
        ({"data_parallel": "zero1", "tp": 2}, "zero1 does not compose with tp=2; use data_parallel='fsdp2'"),
        ({"strategy": "shard_grad_op", "sharding": Sharding(reshard_group=2)}, "keeps it whole; use full_shard"),
        (
            {"data_parallel": "fsdp1", "sharding": Sharding(reshard_group=2)},
            "sharding.reshard_group=2 has no meaning for fsdp1; leave it out, or use data_parallel='fsdp2'",
        ),
        (
            {"data_parallel": "fsdp1", "sharding": Sharding(backward_prefetch=2)},
            "fsdp1 gathers at most 1 unit ahead, but sharding.backward_prefetch=2; use 1, or data_parallel='fsdp2'",
        ),
        (
            {"sharding": Sharding(limit_all_gathers=False)},
            "sharding.limit_all_gathers=False has no meaning for fsdp2; leave it out, or use data_parallel='fsdp1'",
        ),
        *(
            ({"data_parallel": backend, "ep": 2}, f"{backend} does not compose with ep=2; use data_parallel='fsdp2'")
            for backend in ("ddp", "zero1", "fsdp1")
        ),
        ({"strategy": "no_shard", "ep": 2}, "strategy='no_shard' keeps every parameter whole; use 'full_shard' or"),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**fields)


def test_an_unknown_dtype_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(ValueError, match="unknown compute 'half'; legal: stored, float32, bfloat16"):
        Precision(compute="half")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forward_prefetch": -1}, "forward_prefetch=-1 must be at least 0"),
        ({"unit_min_parameters": 0}, "unit_min_parameters=0 must be at least 1"),
        ({"unit_min_parameters": 5000}, "unit_min_parameters=5000 needs units='size'; units is 'block'"),
        ({"unit_min_parameters": 5000.0}, "unit_min_parameters=5000.0 must be an integer"),
        ({"reshard_group": 1}, "reshard_group=1 must be at least 2"),
        ({"units": "layer"}, "unknown units 'layer'; legal: block, size, model"),
        ({"cpu_offload": 1}, "cpu_offload=1 must be true or false"),
    ],
)
def test_an_illegal_way_of_sharding_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sharding(**fields)


@pytest.mark.parametrize("group", [3, 4, 8])
def test_a_resharding_group_must_be_a_proper_divisor(group: int) -> None:
    config = ParallelConfig(dp_shard=4, sharding=Sharding(reshard_group=group))
    with pytest.raises(ValueError, match=r"must divide dp_shard x cp = 4 x 1 = 4 ranks and be less; legal here: \[2\]"):
        check_layout(config, DENSE)


def test_dp_shard_of_minus_one_takes_the_ranks_that_are_left() -> None:
    assert resolve(ParallelConfig(tp=2), 8).dp_shard == 4
    assert resolve(ParallelConfig(dp_replicate=2, strategy="hybrid_shard"), 8).dp_shard == 4


def test_a_backend_that_replicates_takes_the_ranks_that_are_left_as_replicas() -> None:
    resolved = resolve(ParallelConfig(data_parallel="ddp", tp=2), 8)
    assert (resolved.dp_replicate, resolved.dp_shard) == (4, 1)


def test_fewer_kv_heads_than_tp_is_refused_with_the_legal_degrees() -> None:
    shape = ModelShape(
        num_layers=1, width=64, num_heads=8, num_kv_heads=2, head_dim=8, feed_forward_width=176, vocab_size=260
    )
    with pytest.raises(ValueError, match="tp=4 must divide num_kv_heads=2; legal here: \\[1, 2\\]"):
        check_layout(ParallelConfig(tp=4, dp_shard=1), shape)


def test_a_sequence_that_tp_does_not_divide_is_refused_with_the_nearest_legal_lengths() -> None:
    config = ParallelConfig(tp=2, dp_shard=1)
    with pytest.raises(ValueError, match="sequence_length=5; nearest legal: 4 or 6, or sequence_parallel=False"):
        check_sequence_length(config, 5, DENSE)
    check_sequence_length(ParallelConfig(tp=2, dp_shard=1, sequence_parallel=False), 5, DENSE)


def test_the_feed_forward_width_must_divide_too() -> None:
    shape = ModelShape(**{**DENSE.__dict__, "feed_forward_width": 177})
    with pytest.raises(ValueError, match="tp=2 must divide feed_forward_width=177"):
        check_layout(ParallelConfig(tp=2, dp_shard=1), shape)
