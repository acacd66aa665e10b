"""The LLaMA-style decoder as a plain module that knows nothing of ranks and holds no buffers."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

from models.layers.attention import Attention
from models.layers.feed_forward import FeedForward
from models.layers.loss import LossHead
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotary, rotary_frequencies, rotary_tables
from models.llama.config import LlamaConfig
from models.llama.init import init_llama_parameter

# B batch, S sequence, D model, V vocabulary


class LlamaBlock(nn.Module):
    """Attention and feed-forward layer, each on the normalized residual stream and added to it.

    Args:
        config: Shape of the model.
        feed_forward: Takes the place of the dense feed-forward layer. None: that.
    """

    def __init__(self, config: LlamaConfig, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(
            width=config.width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.shape.head_dim,
            bias=config.attention_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
        )
        self.feed_forward_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.feed_forward = feed_forward or FeedForward(config.width, config.feed_forward_width)

    def forward(self, x_BSD: Tensor, *, rotary: Rotary, attention_inputs: Any) -> Tensor:
        """The residual stream after this block, [B, S, D].

        Args:
            x_BSD: Residual stream, [B, S, D].
            rotary: Cosines and sines of the positions.
            attention_inputs: What the attention core's `prepare` returned.
        """
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotary=rotary, attention_inputs=attention_inputs)
        out_BSD: Tensor = x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))
        return out_BSD


class Llama(nn.Module):
    """Embedding, blocks and head; a pipeline stage sets what it has not to None and drops blocks.

    Attributes:
        config: Shape of the whole model.
        embed: Token embedding. None: the input is a hidden state.
        blocks: Blocks by their number in the whole model.
        norm: Norm before the head.
        head: Map to the vocabulary. None: the output is a hidden state.

    Args:
        config: Shape of the model.
    """

    embed: nn.Embedding | None
    norm: RMSNorm | None
    head: LossHead | None

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleDict({str(index): self._build_block(index) for index in range(config.num_layers)})
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.head = LossHead(config.width, config.vocab_size)
        if config.tied_embeddings:
            self.head.weight = self.embed.get_parameter("weight")

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """The summed loss where there are labels, logits where there are none.

        Args:
            tokens: Token ids, int64 [B, S]; without `embed` the hidden state, [B, S, D].
            positions: Position of each token within its document, int64 [B, S]. None: each row counts from 0.
            document_ids: Document of each token, int64 [B, S]. None: each row is one document.
            labels: Token to be predicted at each position, int64 [B, S], with the ignore index for none.

        Returns:
            With labels the sum over predicted positions of -log p, a float32 scalar (float64 in float64
            models); else the logits, [B, S, V]; without `head` the hidden state, [B, S, D].

        Raises:
            ValueError: If the sequence is longer than the model's positions go.
        """
        x_BSD, context = self._enter(tokens, positions, document_ids)
        for block in self.blocks.values():
            x_BSD = block(x_BSD, **context)
        return self._leave(x_BSD, labels)

    def _build_block(self, index: int) -> nn.Module:
        """The block of that number."""
        return LlamaBlock(self.config)

    def _enter(
        self, tokens: Tensor, positions: Tensor | None, document_ids: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The residual stream before the first block, [B, S, D], and what every block needs to know beside it."""
        if tokens.shape[1] > self.config.max_sequence_length:
            raise ValueError(
                f"the sequence has {tokens.shape[1]} tokens, max_sequence_length={self.config.max_sequence_length}; "
                "shorten it or raise max_sequence_length"
            )
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        x_BSD = tokens if self.embed is None else self.embed(tokens)
        first = next(iter(self.blocks.values()), None)
        attention_inputs = None if first is None else first.attention.core.prepare(document_ids)  # type: ignore[union-attr, operator]
        return x_BSD, {"rotary": self._rotary(positions, x_BSD.dtype), "attention_inputs": attention_inputs}

    def _leave(self, x_BSD: Tensor, labels: Tensor | None) -> Tensor:
        """What the model returns of the residual stream after the last block."""
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        return x_BSD if self.head is None else self.head(x_BSD, labels=labels)

    def init_parameter(self, fqn: str, tensor: Tensor, generator: Generator) -> None:
        """Fills a parameter with initial values that depend on its name and the generator only.

        Args:
            fqn: Name of the parameter in the whole model.
            tensor: The whole parameter; filled in place.
            generator: Source of random numbers, on the tensor's device.

        Raises:
            ValueError: If the model has no such parameter.
        """
        init_llama_parameter(self.config, fqn, tensor, generator)

    def _rotary(self, positions_BS: Tensor, dtype: torch.dtype) -> Rotary:
        config = self.config
        # Angles in bfloat16 would be off by whole turns at positions of some thousands.
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = rotary_frequencies(
            config.shape.head_dim, config.rope_theta, config.rope_scaling, positions_BS.device, dtype
        )
        return rotary_tables(positions_BS, frequencies)
