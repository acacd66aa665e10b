"""Shape of a LLaMA-style model with mixtures of experts beside the presets of published ones."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from models.llama.config import LlamaConfig
from parallel.plan import ModelShape

RouterScore = Literal["softmax", "sigmoid"]
"""How a router's logits become scores: shares of all experts, or each expert by itself."""


@dataclass(frozen=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """What such a decoder is made of; the defaults are the preset `debug`.

    Attributes:
        num_experts: Experts of a layer.
        num_experts_per_token: Experts that a token is sent to, those with the highest scores.
        expert_width: Width between the projections of one expert.
        shared_expert_width: Width of an expert that every token passes beside those; 0: there is none.
        dense_layers: Numbers of the blocks that have one feed-forward layer of `feed_forward_width` instead.
        router_score: How a router's logits become scores.
        normalize_top_k: Divide the scores of a token's experts by their sum.
        balance_loss: Weight of each layer's loss that punishes uneven load, see `models.moe.balance`; 0: there is none.
            Hugging Face's is that of one batch, of all layers at once and num_experts_per_token times as large, so that
            its `router_aux_loss_coef` x num_experts_per_token / layers with experts weighs as much.
        capacity_factor: Room of an expert for the tokens of a row, over an even load; where there is a loss, what does
            not fit passes without that expert, see `models.moe.capacity`. None: no token is dropped.
        balance_rate: What a step adds to or takes from the selection bias of each expert, by its load; 0: no bias.
    """

    num_experts: int = 8
    num_experts_per_token: int = 2
    expert_width: int = 64
    shared_expert_width: int = 0
    dense_layers: tuple[int, ...] = ()
    router_score: RouterScore = "softmax"
    normalize_top_k: bool = True
    balance_loss: float = 0.0
    balance_rate: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        """Checks counts and widths.

        Raises:
            ValueError: If a value is out of its range.
        """
        super().__post_init__()
        for name in ("num_experts", "num_experts_per_token", "expert_width"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("shared_expert_width", "balance_loss", "balance_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor={self.capacity_factor} must be positive, or None to drop no token")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token={self.num_experts_per_token} is more than num_experts={self.num_experts}"
            )
        outside = [index for index in self.dense_layers if not 0 <= index < self.num_layers]
        if outside or len(set(self.dense_layers)) != len(self.dense_layers):
            raise ValueError(f"dense_layers={self.dense_layers} must be different ones of 0 to {self.num_layers - 1}")
        if self.router_score not in get_args(RouterScore):
            raise ValueError(f"unknown router_score {self.router_score!r}; legal: {', '.join(get_args(RouterScore))}")

    @classmethod
    def _presets(cls) -> dict[str, dict[str, Any]]:
        return MOE_PRESETS

    @property
    def shape(self) -> ModelShape:
        """Counts and widths, from which `parallel` computes."""
        return replace(
            super().shape,
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            expert_width=self.expert_width,
            shared_expert_width=self.shared_expert_width,
            num_dense_layers=len(self.dense_layers),
        )

    @property
    def num_matmul_parameters_per_sparse_block(self) -> int:
        """Elements of the matrices that a token meets in a block with experts."""
        widths = self.num_experts_per_token * self.expert_width + self.shared_expert_width - self.feed_forward_width
        return self.num_matmul_parameters_per_block + self.width * (3 * widths + self.num_experts)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones once and biases for balance among them."""
        bias = self.num_experts if self.balance_rate else 0
        return super().num_parameters + (self.num_layers - len(self.dense_layers)) * bias


MOE_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {},
    "mixtral-8x7b": {
        "num_layers": 32,
        "width": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "feed_forward_width": 14_336,
        "expert_width": 14_336,
        "vocab_size": 32_000,
        "max_sequence_length": 32_768,
        "rope_theta": 1e6,
        "balance_loss": 0.02 * 2 / 32,
    },
    "qwen3-30b-a3b": {
        "num_layers": 48,
        "width": 2048,
        "num_heads": 32,
        "num_kv_heads": 4,
        "head_dim": 128,
        "qk_norm": True,
        "norm_eps": 1e-6,
        "feed_forward_width": 6144,
        "num_experts": 128,
        "num_experts_per_token": 8,
        "expert_width": 768,
        "vocab_size": 151_936,
        "max_sequence_length": 40_960,
        "rope_theta": 1e6,
        "balance_loss": 0.001 * 8 / 48,
    },
}
"""Fields of published models that differ from the defaults, by name."""
