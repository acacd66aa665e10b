"""The step of one model, ours beside the shortest loops that a user would write with torch alone."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import Batch, ParallelConfig, build_mesh, materialize, parallelize

MODEL = LlamaConfig(num_layers=6, width=256, num_heads=8, num_kv_heads=4, feed_forward_width=688, vocab_size=8192)
ROWS, LENGTH = 4, 256
MAX_NORM, LEARNING_RATE = 1.0, 1e-3

# B batch, S sequence, D model, V vocabulary


def random_batch(seed: int, rows: int = ROWS, length: int = LENGTH, vocab_size: int = MODEL.vocab_size) -> Batch:
    """Random tokens that all enter the loss.

    Args:
        seed: Seed of the draw.
        rows: Rows of the batch.
        length: Tokens of a row.
        vocab_size: Entries of the vocabulary.
    """
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return Batch.from_tokens(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def our_step(config: ParallelConfig) -> Callable[[], object]:
    """One step of ours: forward, backward, clipping, fused AdamW.

    Args:
        config: The layout.
    """
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(MODEL)
    trained = parallelize(model, mesh, config, llama_plan(MODEL))
    materialize(trained)
    optimizer = trained.build_optimizer(lambda named: torch.optim.AdamW(named.values(), lr=LEARNING_RATE, fused=True))
    batch = random_batch(mesh.coordinate("dp"))

    def step() -> None:
        trained.forward_backward([batch])
        trained.clip_gradients(MAX_NORM)
        optimizer.step()

    return step


def fully_shard_loop() -> Callable[[], object]:
    """The same step by hand: `fully_shard` on the same units with the same resharding, torch's own clipping."""
    _start_group()
    with torch.device("meta"):
        model = Llama(MODEL)
    fully_shard(model.get_submodule("embed"))
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard([model.get_submodule("norm"), model.get_submodule("head")])
    fully_shard(model)
    return _loop(model, random_batch(dist.get_rank()))


class PlainHead(nn.Module):
    """The head as one writes it without us: all logits, then cross-entropy.

    Args:
        width: Width of the residual stream.
        vocab_size: Entries of the vocabulary.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, vocab_size, bias=False)

    def forward(self, x_BSD: Tensor, labels: Tensor) -> Tensor:
        """The summed loss."""
        logits_BSV = self.linear(x_BSD)
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels.flatten(), reduction="sum")


def parallelize_module_loop() -> Callable[[], object]:
    """Tensor parallelism with sequence and loss parallel by hand, over all ranks."""
    _start_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = Llama(MODEL)
        model.head = PlainHead(MODEL.width, MODEL.vocab_size)  # type: ignore[assignment]
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    styles = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head.linear": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for name in model.blocks:
        styles |= {
            f"blocks.{name}.attention_norm": SequenceParallel(),
            f"blocks.{name}.feed_forward_norm": SequenceParallel(),
            f"blocks.{name}.attention": gather,
            f"blocks.{name}.feed_forward": gather,
        }
        for colwise in ("attention.q_proj", "attention.k_proj", "attention.v_proj"):
            styles[f"blocks.{name}.{colwise}"] = ColwiseParallel()
        for colwise in ("feed_forward.gate_proj", "feed_forward.up_proj"):
            styles[f"blocks.{name}.{colwise}"] = ColwiseParallel()
        for rowwise in ("attention.o_proj", "feed_forward.down_proj"):
            styles[f"blocks.{name}.{rowwise}"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, styles)
    step = _loop(model, random_batch(0))

    def with_loss_parallel() -> None:
        with loss_parallel():
            step()

    return with_loss_parallel


def _start_group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def _loop(model: nn.Module, batch: Batch) -> Callable[[], object]:
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    num_tokens = batch.labels.numel()

    def step() -> float:
        loss = model(batch.tokens, labels=batch.labels) / num_tokens
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step
