"""Shape of a LLaMA-style model beside the presets of published ones."""

from dataclasses import dataclass
from typing import Any, Self

from models.config import ModelConfig
from models.layers.rotary import RotaryScaling
from parallel.ledger.flops import num_parameters
from parallel.plan import ModelShape

_POSITIVE = ("num_layers", "width", "num_heads", "num_kv_heads", "feed_forward_width", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """What a LLaMA-style decoder is made of; the defaults are the preset `debug`.

    Attributes:
        num_layers: Blocks.
        width: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; each serves num_heads / num_kv_heads query heads.
        head_dim: Components of a head. None: width / num_heads.
        feed_forward_width: Width between the projections of the feed-forward layer.
        vocab_size: Entries of the vocabulary.
        max_sequence_length: Most tokens of a sequence.
        rope_theta: Base of the rotary embedding's wave lengths.
        rope_scaling: Llama 3's stretch of slow rotary frequencies. None: no stretch.
        norm_eps: What RMSNorm adds to the mean square.
        tied_embeddings: Use the embedding as the head's weight.
        attention_bias: Give q, k and v projections a bias, as Qwen2 does.
        qk_norm: Normalize queries and keys by head, as Qwen3 does.
        init_std: Standard deviation of initial weights; projections into the residual stream get
            1 / sqrt(2 num_layers) of it, so that its variance does not grow with depth.
    """

    num_layers: int = 4
    width: int = 64
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int | None = None
    feed_forward_width: int = 176
    vocab_size: int = 260
    max_sequence_length: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RotaryScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        """Checks counts and widths.

        Raises:
            ValueError: If a count is not positive, heads do not divide, or head_dim is odd.
        """
        for name in (*_POSITIVE, "max_sequence_length", "rope_theta", "norm_eps", "init_std"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.num_heads % self.num_kv_heads:
            legal = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}; legal: {legal}")
        if self.head_dim is None and self.width % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must divide width={self.width} where head_dim is not given; set head_dim"
            )
        head_dim = self.shape.head_dim
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim={head_dim} must be even: the rotary embedding turns pairs; set head_dim")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The config of a published model.

        Args:
            name: One of the family's presets: `PRESETS` here.
            overrides: Fields to set differently.

        Raises:
            ValueError: If there is no such preset.
        """
        presets = cls._presets()
        if name not in presets:
            raise ValueError(f"unknown preset {name!r}; legal: {', '.join(presets)}")
        return cls(**presets[name] | overrides)

    @classmethod
    def _presets(cls) -> dict[str, dict[str, Any]]:
        return PRESETS

    @property
    def shape(self) -> ModelShape:
        """Counts and widths, from which `parallel` computes."""
        return ModelShape(
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.width // self.num_heads if self.head_dim is None else self.head_dim,
            feed_forward_width=self.feed_forward_width,
            vocab_size=self.vocab_size,
            tied_embeddings=self.tied_embeddings,
            max_sequence_length=self.max_sequence_length,
        )

    @property
    def num_matmul_parameters_per_block(self) -> int:
        """Elements of one block's matrices."""
        query, key_value = (heads * self.shape.head_dim for heads in (self.num_heads, self.num_kv_heads))
        return self.width * (2 * query + 2 * key_value + 3 * self.feed_forward_width)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones once."""
        head_dim = self.shape.head_dim
        bias = (self.num_heads + 2 * self.num_kv_heads) * head_dim if self.attention_bias else 0
        head_norms = 2 * head_dim if self.qk_norm else 0
        return num_parameters(self.shape) + self.num_layers * (bias + head_norms)


_LLAMA2 = {"vocab_size": 32_000, "max_sequence_length": 4096}
_LLAMA3 = {"vocab_size": 128_256, "max_sequence_length": 131_072, "rope_theta": 500_000.0}
_LLAMA31 = _LLAMA3 | {"rope_scaling": RotaryScaling(factor=8.0)}
_LLAMA32 = _LLAMA3 | {"rope_scaling": RotaryScaling(factor=32.0), "tied_embeddings": True}
_SMOLLM2 = {"vocab_size": 49_152, "max_sequence_length": 8192, "rope_theta": 100_000.0, "tied_embeddings": True}


def _size(num_layers: int, width: int, num_heads: int, num_kv_heads: int, feed_forward_width: int) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "width": width,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "feed_forward_width": feed_forward_width,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "debug": {},
    "smollm2-135m": _SMOLLM2 | _size(30, 576, 9, 3, 1536) | {"init_std": 1 / 24},
    "llama2-7b": _LLAMA2 | _size(32, 4096, 32, 32, 11_008),
    "llama2-13b": _LLAMA2 | _size(40, 5120, 40, 40, 13_824),
    "llama2-70b": _LLAMA2 | _size(80, 8192, 64, 8, 28_672),
    "llama3.1-8b": _LLAMA31 | _size(32, 4096, 32, 8, 14_336),
    "llama3.1-70b": _LLAMA31 | _size(80, 8192, 64, 8, 28_672),
    "llama3.1-405b": _LLAMA31 | _size(126, 16_384, 128, 8, 53_248),
    "llama3.2-1b": _LLAMA32 | _size(16, 2048, 32, 8, 8192),
    "llama3.2-3b": _LLAMA32 | _size(28, 3072, 24, 8, 8192),
}
"""Fields of published models that differ from the defaults, by name."""
