"""A LLaMA with a layer that enters the loss only where a batch holds a certain token, and rows that hold it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import Batch, Mesh, ParallelConfig, Trained, build_mesh, materialize, parallelize
from tests.parallel.small_model import batches

MARK = 259
CONFIG = LlamaConfig(num_layers=1, width=32, num_heads=4, num_kv_heads=2, feed_forward_width=48)


class Branching(Llama):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.extra = nn.Linear(4, 4, bias=False)

    def forward(self, tokens: Tensor, *, labels: Tensor | None = None, **inputs: Any) -> Tensor:
        output = super().forward(tokens, labels=labels, **inputs)
        num_marks = int((tokens == MARK).sum())
        if labels is None or not num_marks:
            return output
        return output + num_marks * self.extra(self.extra.weight.new_ones(4)).pow(2).sum()

    def init_parameter(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        if fqn.startswith("extra"):
            tensor.fill_(0.5)
        else:
            super().init_parameter(fqn, tensor, generator)


def build_branching(config: ParallelConfig, *, dtype: torch.dtype = torch.float64, freeze: bool = False) -> Trained:
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Branching(CONFIG).to(dtype)
    model.extra.requires_grad_(not freeze)
    plan = llama_plan(CONFIG)
    # The root then holds embedding, norm and head beside the extra layer.
    blocks = tuple(unit for unit in plan.units if unit.modules[0].startswith("blocks"))
    trained = parallelize(model, mesh, config, replace(plan, units=blocks))
    materialize(trained)
    return trained


def marked(mesh: Mesh, step: int, num_micro_batches: int, where: set[tuple[int, int]]) -> list[Batch]:
    """This rank's micro-batches, of which those of the given (rank, micro-batch) of two ranks hold the mark."""
    found = batches(mesh, step, num_micro_batches * 2 // mesh.degree("dp"))
    for index, batch in enumerate(found):
        if divmod(index + mesh.coordinate("dp") * len(found), num_micro_batches) in where:
            batch.tokens[0, 0] = MARK
        else:
            batch.tokens[batch.tokens == MARK] = 0
    return found
