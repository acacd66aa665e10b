"""Trains a module of your own, here a `LlamaForCausalLM` of transformers, split by a plan: `recipes.own_module`."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.layers.loss import LossHead
from parallel import IGNORE_INDEX, Batch, Mesh, ModelShape, ParallelConfig, ParallelPlan, Unit, build_mesh, parallelize
from recipes.command import parse
from recipes.launch import run

# B batch, S sequence, D model, V vocabulary

LAYOUT = ParallelConfig(dp_shard=2, tp=2, sequence_parallel=False)
GLOBAL_BATCH, SEQUENCE_LENGTH = 8, 32


class OwnModule(nn.Module):
    """All that `parallelize` asks of a module: it is called in this way, and returns a summed loss or logits.

    Attributes:
        inner: The module as its author wrote it.
        head: Computes loss and logits from the module's last hidden states, with a weight that is the module's own.

    Args:
        inner: The module.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner: Any = inner
        weight: nn.Parameter = inner.lm_head.weight
        with torch.device("meta"):
            self.head = LossHead(weight.shape[1], weight.shape[0])
        self.head.weight = weight

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """The loss summed over predicted positions where there are labels, logits [B, S, V] where there are none.

        Args:
            tokens: Token ids, int64 [B, S].
            positions: Position of each token within its document, int64 [B, S]. None: each row counts from 0.
            document_ids: Document of each token, int64 [B, S]. None: each row is one document.
            labels: Token to be predicted at each position, int64 [B, S], with the ignore index for none.
        """
        mask_B1SS = None
        if document_ids is not None:
            mask_B1SS = (document_ids[:, :, None] == document_ids[:, None, :]).tril_().unsqueeze(1)
        output = self.inner.model(tokens, attention_mask=mask_B1SS, position_ids=positions, use_cache=False)
        loss_or_logits: Tensor = self.head(output.last_hidden_state, labels)
        return loss_or_logits


def plan_of(config: Any) -> ParallelPlan:
    """What parallelism has to know of the module.

    Args:
        config: A `LlamaConfig` of transformers.
    """
    layer = "inner.model.layers.*"
    return ParallelPlan(
        shape=shape_of(config),
        tensor_parallel={
            "inner.model.embed_tokens": "embedding",
            **{f"{layer}.self_attn.{name}_proj": "colwise" for name in "qkv"},
            f"{layer}.self_attn.o_proj": "rowwise",
            **{f"{layer}.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
            f"{layer}.mlp.down_proj": "rowwise",
            "head": "head",
        },
        units=tuple(Unit(modules=(f"inner.model.layers.{index}",)) for index in range(config.num_hidden_layers)),
        tied=(("inner.lm_head.weight", "head.weight"),),
    )


def shape_of(config: Any) -> ModelShape:
    """Counts and widths, by which layouts are checked.

    Args:
        config: A `LlamaConfig` of transformers.
    """
    return ModelShape(
        num_layers=config.num_hidden_layers,
        width=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        feed_forward_width=config.intermediate_size,
        vocab_size=config.vocab_size,
    )


def build_inner() -> Any:
    """A small model of transformers in float64, with the same values on every rank."""
    # Not at the top: only this needs it.
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).double()


def batch_of(mesh: Mesh, step: int) -> Batch:
    """This rank's rows of a global batch of random tokens, of which each row leaves out some.

    Args:
        mesh: Tells which rows.
        step: Number of the batch.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (GLOBAL_BATCH, SEQUENCE_LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.arange(SEQUENCE_LENGTH) >= 4 * torch.arange(1, GLOBAL_BATCH + 1)[:, None]] = IGNORE_INDEX
    positions = torch.arange(SEQUENCE_LENGTH).expand_as(labels)
    # Two documents a row, between which attention does not look.
    documents = (positions >= 10).long()
    rows = [each.chunk(mesh.degree("dp"))[mesh.coordinate("dp")] for each in (tokens[:, :-1], labels, documents)]
    positions = (positions - 10 * documents)[: len(rows[0])]
    return Batch(tokens=rows[0], labels=rows[1], positions=positions, document_ids=rows[2])


def train(layout: ParallelConfig, steps: int) -> list[float]:
    """Trains the module on the mesh of a layout; every rank calls this.

    Args:
        layout: How to split it.
        steps: Optimizer steps.

    Returns:
        Mean loss of each step, in nats a token.
    """
    mesh, module = build_mesh(layout), OwnModule(build_inner())
    trained = parallelize(module, mesh, layout, plan_of(module.inner.config))
    optimizer = trained.build_optimizer(lambda named: torch.optim.AdamW(list(named.values()), lr=1e-3))
    losses = []
    for step in range(steps):
        losses.append(trained.forward_backward([batch_of(mesh, step)]).loss)
        norm = trained.clip_gradients(1.0).item()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"{mesh.describe()}: step {step + 1}  loss {losses[-1]:.12f}  gradient norm {norm:.6f}")
    return losses


@dataclass(frozen=True, kw_only=True)
class OwnModuleCommand:
    """Trains a small LlamaForCausalLM of transformers, unmodified, on one process and on 4 ranks, and compares losses.

    Attributes:
        steps: Optimizer steps.
        debug: Show the traceback of an error.
    """

    steps: int = 5
    debug: bool = False


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.
    """
    command = parse(OwnModuleCommand, arguments, "python -m recipes.own_module")
    one, split = (
        run(train, layout, command.steps, num_processes=ranks, debug=command.debug)
        for layout, ranks in ((ParallelConfig(data_parallel="none"), 1), (LAYOUT, 4))
    )
    worst = max(abs(a - b) / a for a, b in zip(one, split, strict=True))
    print(f"losses on 4 ranks differ from those of one process by at most {worst:.1e} of them")


if __name__ == "__main__":
    main()
