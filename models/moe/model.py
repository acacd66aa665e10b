"""The LLaMA-style decoder whose blocks have mixtures of experts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn

from models.layers.rotary import Rotary
from models.llama.model import Llama, LlamaBlock
from models.moe.balance import AddGradient, Routing, bias_updates
from models.moe.config import MoeConfig
from models.moe.feed_forward import MoeFeedForward
from models.moe.init import init_moe_parameter
from parallel.batch import IGNORE_INDEX

# B batch, S sequence, D model, V vocabulary, L layers with experts, E experts


class MoeBlock(LlamaBlock):
    """A block whose feed-forward layer is a mixture of experts.

    Args:
        config: Shape of the model.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config, MoeFeedForward(config))

    def forward(  # type: ignore[override]  # experts have more to say
        self, x_BSD: Tensor, *, rotary: Rotary, attention_inputs: Any, valid: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        """The residual stream after this block, [B, S, D], and where tokens went.

        Args:
            x_BSD: Residual stream, [B, S, D].
            rotary: Cosines and sines of the positions.
            attention_inputs: What the attention core's `prepare` returned.
            valid: Which tokens enter the loss, bool [B, S]. None: there is no loss.
        """
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotary=rotary, attention_inputs=attention_inputs)
        # Returned and not kept here: activation checkpointing runs a block twice.
        out_BSD, routing = self.feed_forward(self.feed_forward_norm(x_BSD), valid)
        return x_BSD + out_BSD, routing


class Moe(Llama):
    """A `Llama` whose blocks have experts, but for those that the config calls dense.

    With labels it returns the loss of the predictions; its gradient is that of this loss and of
    `balance_loss` times the balance loss of every layer.

    Args:
        config: Shape of the model.
    """

    config: MoeConfig

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)
        self._loads: list[Tensor] = []

    def forward(  # type: ignore[override]  # a stage of a pipeline takes and gives a loss too
        self,
        tokens: Tensor,
        balance_loss: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The summed loss where there are labels, logits where there are none.

        Args:
            tokens: Token ids, int64 [B, S]; without `embed` the hidden state, [B, S, D].
            balance_loss: Without `embed`, the balance loss of the blocks before these.
            positions: Position of each token within its document, int64 [B, S]. None: each row counts from 0.
            document_ids: Document of each token, int64 [B, S]. None: each row is one document.
            labels: Token to be predicted at each position, int64 [B, S], with the ignore index for none.

        Returns:
            With labels the sum over predicted positions of -log p, a float32 scalar (float64 in float64
            models); else the logits, [B, S, V]; without `head` the hidden state, [B, S, D], and, where there are
            labels and such a loss, the balance loss of the blocks so far.

        Raises:
            ValueError: If the sequence is longer than the model's positions go.
        """
        x_BSD, context = self._enter(tokens, positions, document_ids)
        valid = None if labels is None else labels != IGNORE_INDEX
        losses, loads = [] if balance_loss is None else [balance_loss], []
        for number, block in self.blocks.items():
            if int(number) in self.config.dense_layers:
                x_BSD = block(x_BSD, **context)
                continue
            x_BSD, routing = block(x_BSD, **context, valid=valid)
            if routing is not None:
                loads.append(routing.load)
                losses += [] if routing.balance_loss is None else [routing.balance_loss]
        if loads and torch.is_grad_enabled():
            self._loads.append(torch.stack(loads))
        out = self._leave(x_BSD, labels)
        if not losses:
            return out
        total = torch.stack(losses).sum()
        if self.head is None:
            return out, total
        return AddGradient.apply(out, self.config.balance_loss * total)

    def take_expert_load(self) -> Tensor:
        """Valid tokens that came to each expert in forwards with gradients since this was last called, int64 [L, E]."""
        if not self._loads:
            return torch.zeros(0, self.config.num_experts, dtype=torch.int64)
        # `nn.DataParallel` runs copies on several devices, which share the list.
        load = torch.stack([each.to(self._loads[0].device) for each in self._loads]).sum(0)
        self._loads.clear()
        return load

    def balance_updates(self, load: Tensor) -> Mapping[str, Tensor]:
        """What a step adds to parameters that no gradient moves, by their fqn; whole tensors.

        Args:
            load: Valid tokens of the global batch that came to each expert, int64 [L, E].
        """
        if not self.config.balance_rate:
            return {}
        sparse = [number for number in self.blocks if int(number) not in self.config.dense_layers]
        updates_LE = bias_updates(load, self.config.balance_rate)
        names = [f"blocks.{number}.feed_forward.router.selection_bias" for number in sparse]
        return dict(zip(names, updates_LE, strict=True))

    def init_parameter(self, fqn: str, tensor: Tensor, generator: Generator) -> None:
        """Fills a parameter with initial values that depend on its name and the generator only.

        Args:
            fqn: Name of the parameter in the whole model.
            tensor: The whole parameter; filled in place.
            generator: Source of random numbers, on the tensor's device.

        Raises:
            ValueError: If the model has no such parameter.
        """
        init_moe_parameter(self.config, fqn, tensor, generator)

    def _build_block(self, index: int) -> nn.Module:
        return super()._build_block(index) if index in self.config.dense_layers else MoeBlock(self.config)
