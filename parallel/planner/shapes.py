"""Shapes of models that published results use and that this toolkit does not build."""

from parallel.plan import ModelShape


def _gpt(num_layers: int, width: int, num_heads: int, vocab_size: int) -> ModelShape:
    """A decoder with two matrices of 4 widths in its feed-forward layer and one matrix for embedding and head.

    Two matrices of 4 widths are as many elements, and keep as much for backward, as three of 8/3, rounded here to what
    8 divides.
    """
    return ModelShape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=width // num_heads,
        feed_forward_width=8 * round(width / 3),
        vocab_size=vocab_size,
        tied_embeddings=True,
    )


_MPT_VOCABULARY = 50_432

SHAPES: dict[str, ModelShape] = {
    "gpt-175b": _gpt(96, 12_288, 96, 51_200),
    "mpt-7b": _gpt(32, 4096, 32, _MPT_VOCABULARY),
    "mpt-13b": _gpt(40, 5120, 40, _MPT_VOCABULARY),
    "mpt-30b": _gpt(48, 7168, 56, _MPT_VOCABULARY),
    "mpt-70b": _gpt(80, 8192, 64, _MPT_VOCABULARY),
    # 40 layers of width 5120 with 8 of 40 heads for keys give 14.84 B at 3.5 widths in the feed-forward layer.
    "llama-14.84b": ModelShape(
        num_layers=40,
        width=5120,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        feed_forward_width=17_920,
        vocab_size=128_256,
    ),
}
"""Shapes by name. Source: Brown et al. 2020, table 2.1, for 175B; llm-foundry's configs for MPT."""
