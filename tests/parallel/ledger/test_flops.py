"""FLOPs by each convention, against figures computed by hand from published shapes."""

import dataclasses

import pytest

from models.llama import PRESETS, LlamaConfig
from models.moe import MoeConfig
from parallel.ledger.flops import (
    FlopConvention,
    num_parameters,
    recomputed_flops_per_token,
    training_flops_per_token,
    utilization,
)

# Llama 3.1 8B: 32 layers, width 4096, 32 heads of 128, 8,030,261,248 parameters, table 128,256 x 4096 = 525,336,576.
EIGHT_B = LlamaConfig.preset("llama3.1-8b").shape
# SmolLM2 135M: 30 layers, width 576, 9 heads of 64, 134,515,008 parameters; head and table are one matrix.
SMOLLM = LlamaConfig.preset("smollm2-135m").shape


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_follow_from_the_shape(preset: str) -> None:
    config = LlamaConfig.preset(preset)
    assert num_parameters(config.shape) == config.num_parameters


@pytest.mark.parametrize(
    ("convention", "flops"),
    [
        # 6 x 7,504,924,672 + 12 x 32 x 4096 x 8192
        ("full_attention", 45_029_548_032 + 12_884_901_888),
        # 6 x 8,030,261,248 + 12 x 32 x 4096 x 8192
        ("all_parameters", 48_181_567_488 + 12_884_901_888),
        # 6 x 7,504,924,672 + 6 x 32 x 4096 x 8192
        ("causal", 45_029_548_032 + 6_442_450_944),
    ],
)
def test_the_conventions_give_the_figures_of_8b_at_8192_tokens(convention: FlopConvention, flops: int) -> None:
    assert training_flops_per_token(EIGHT_B, 8192, convention) == flops


@pytest.mark.parametrize(
    ("convention", "flops"),
    [
        # 6 x 134,515,008 + 12 x 30 x 576 x 2048: the head is multiplied, though its matrix is the table too.
        ("full_attention", 807_090_048 + 424_673_280),
        ("all_parameters", 807_090_048 + 424_673_280),
        ("causal", 807_090_048 + 212_336_640),
    ],
)
def test_a_tied_head_counts_once_by_every_convention(convention: FlopConvention, flops: int) -> None:
    assert training_flops_per_token(SMOLLM, 2048, convention) == flops


def test_heads_that_do_not_add_up_to_the_width_are_counted_as_they_are() -> None:
    shape = LlamaConfig(
        num_layers=1, width=4, num_heads=2, num_kv_heads=1, head_dim=6, feed_forward_width=8, vocab_size=10
    ).shape
    # Matrices 4 x 6 x (2 x 2 + 2 x 1) + 3 x 4 x 8 = 240, three norms of 4, table and head 40 each; 12 x 2 x 6 x 5.
    assert num_parameters(shape) == 240 + 12 + 80
    assert training_flops_per_token(shape, 5, "full_attention") == 6 * 292 + 720


def test_a_token_takes_the_flops_of_the_experts_that_it_meets() -> None:
    # Mixtral 8x7B: 46,702,792,704 parameters. Of each of 32 layers 6 experts of 3 x 4096 x 14,336 are not met.
    mixtral = MoeConfig.preset("mixtral-8x7b").shape
    assert num_parameters(mixtral) == 46_702_792_704
    met = 46_702_792_704 - 32 * 6 * 3 * 4096 * 14_336
    assert training_flops_per_token(mixtral, 4096, "all_parameters") == 6 * met + 12 * 32 * 4096 * 4096
    # Qwen3-30B-A3B: 30,532,122,624 parameters; those of the norms of heads, 48 x 2 x 128, are left out.
    qwen = MoeConfig.preset("qwen3-30b-a3b").shape
    assert num_parameters(qwen) == 30_532_122_624 - 12_288
    # One dense layer of two, a shared expert: matrices, routers and norms by hand.
    small = dataclasses.replace(MoeConfig(num_layers=2).shape, num_dense_layers=1, shared_expert_width=32)
    layers = 2 * (64 * 8 * 24 + 2 * 64) + 3 * 64 * 176 + 64 * (3 * (8 * 64 + 32) + 8)
    assert num_parameters(small) == layers + 2 * 260 * 64 + 64


def test_experts_are_as_wide_as_dense_layers_where_the_shape_does_not_say() -> None:
    listed = dataclasses.replace(EIGHT_B, num_experts=8, num_experts_per_token=2)
    extra = 32 * 4096 * (3 * 14_336 + 8)
    assert training_flops_per_token(listed, 8192, "causal") == training_flops_per_token(EIGHT_B, 8192, "causal") + (
        6 * extra
    )


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown FLOP convention 'halved'; legal: full_attention, all_parameters, c"):
        training_flops_per_token(EIGHT_B, 8192, "halved")  # type: ignore[arg-type]


def test_utilization_is_the_share_of_all_devices() -> None:
    # 8 devices of 1000 FLOP/s, of which 10 FLOPs for each of 400 tokens a second are half.
    assert utilization(10, 400, 1000, 8) == 0.5


def test_what_is_computed_again_is_a_forward_without_the_last_matmul_of_each_block() -> None:
    config = LlamaConfig.preset("llama3.1-8b")
    shape, matmuls = config.shape, config.num_matmul_parameters_per_block
    last = shape.width * shape.feed_forward_width
    attention = 4 * shape.num_heads * shape.head_dim * 8192
    full = recomputed_flops_per_token(shape, 8192, "full_attention", frozenset())
    assert full == shape.num_layers * (2 * (matmuls - last) + attention)
    assert recomputed_flops_per_token(shape, 8192, "full_attention", None) == 0
    # Every second of seven matmuls and attention are kept: k, o and up.
    kept = frozenset({"k", "o", "up", "attention"})
    keys = shape.num_kv_heads * shape.head_dim
    selective = 2 * shape.width * (shape.width + keys + shape.feed_forward_width) * shape.num_layers
    assert recomputed_flops_per_token(shape, 8192, "causal", kept) == selective
    assert recomputed_flops_per_token(shape, 8192, "causal", kept, every=2) == selective // 2
