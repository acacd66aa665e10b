"""Forward and backward over the micro-batches of one step, scaled by the valid tokens of the global batch."""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.batch import IGNORE_INDEX, Batch
from parallel.experts import forget_load, num_dropped, sum_load
from parallel.loss_scale import unscale_or_skip
from parallel.mesh import Mesh
from parallel.replicas import differ_between_ranks, hash_bits

if TYPE_CHECKING:
    from parallel.trained import Trained


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step computed, equal on every rank.

    Attributes:
        loss_sum: Loss summed over the valid tokens of the global batch, in nats.
        num_valid_tokens: Tokens that entered it.
        skipped: Whether no gradient exists, because there was no such token, or because gradients of a float16 model
            overflowed on some rank.
        expert_load: Valid tokens of the global batch that came to each expert, by layer; None for a dense model.
        num_dropped: Of valid tokens how often, over all layers, an expert had no room for one; None for a dense model.
    """

    loss_sum: float
    num_valid_tokens: int
    skipped: bool = False
    expert_load: tuple[tuple[int, ...], ...] | None = None
    num_dropped: int | None = None

    @property
    def loss(self) -> float:
        """Mean loss per valid token, in nats; NaN if there was none."""
        return self.loss_sum / self.num_valid_tokens if self.num_valid_tokens else float("nan")


def forward_backward(trained: "Trained", micro_batches: Sequence[Batch]) -> StepResult:
    """Computes the gradients of one step; see `Trained.forward_backward`."""
    for parameter in trained.named_parameters().values():
        parameter.grad = None
    forget_load(trained)
    num_valid_tokens = _agree_on_tokens(trained, micro_batches, call="forward_backward")
    if num_valid_tokens == 0:
        warnings.warn("no token of the global batch is valid: this step computes no gradient", stacklevel=3)
        return StepResult(loss_sum=0.0, num_valid_tokens=0, skipped=True)
    # A scale is a power of two by default, so that dividing by the quotient rounds as dividing by the tokens alone.
    divisor = num_valid_tokens if trained.loss_scale is None else num_valid_tokens / trained.loss_scale.value
    if trained.pipeline is not None:
        losses = [trained.pipeline.forward_backward([_on_rank(trained, each) for each in micro_batches], divisor)]
    else:
        losses = _accumulate(trained, micro_batches, divisor)
    skipped = unscale_or_skip(trained)
    load = sum_load(trained)
    if skipped:
        trained.expert_load = None  # not even this moves a parameter
    dropped = None if load is None else num_dropped(load, trained.plan.shape, num_valid_tokens)
    return replace(_total(trained, losses, num_valid_tokens), skipped=skipped, expert_load=load, num_dropped=dropped)


def _accumulate(trained: "Trained", micro_batches: Sequence[Batch], divisor: float) -> list[Tensor]:
    """Forward and backward of one micro-batch after the other; returns their summed losses."""
    reduce_each = (trained.config.reduce_gradients or trained.backend.default_reduce_gradients) == "every_micro_batch"
    losses: list[Tensor] = []

    def compute(batch: Batch) -> None:
        loss = _summed_loss(trained, batch)
        losses.append(loss.detach())
        (loss / divisor).backward()

    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        trained.backend.run_micro_batch(trained.model, functools.partial(compute, batch), reduce=reduce_each or last)
    return losses


@torch.no_grad()
def evaluate(trained: "Trained", micro_batches: Sequence[Batch]) -> StepResult:
    """Computes the loss alone; see `Trained.evaluate`."""
    num_valid_tokens = _agree_on_tokens(trained, micro_batches, call="evaluate")
    losses = [_summed_loss(trained, batch) for batch in micro_batches]
    return _total(trained, losses, num_valid_tokens)


def _summed_loss(trained: "Trained", batch: Batch) -> Tensor:
    tokens, positions, labels, documents = _on_rank(trained, batch)
    loss: Tensor = trained.model(tokens, positions=positions, document_ids=documents, labels=labels)
    return loss


def _on_rank(trained: "Trained", batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What the model on this rank is given of a micro-batch."""
    batch = batch.to(trained.mesh.device)
    tokens, positions, labels = (trained.cut.part(each) for each in (batch.tokens, batch.positions, batch.labels))
    # Of documents every rank needs those of the whole sequence, which its tokens look back on.
    return tokens, positions, labels, batch.document_ids


def _agree_on_tokens(
    trained: "Trained", micro_batches: Sequence[Batch], *, call: Literal["forward_backward", "evaluate"]
) -> int:
    """Counts the valid tokens of the global batch and makes sure that every rank can run the step.

    A rank that raised alone would leave the others waiting in a collective, so refusals travel with the count.
    """
    problem: Exception | None = None
    device, tokens = trained.mesh.device, 0
    # Negative in an evaluation, so that a rank which has run out of data and evaluates meets nobody's step.
    number = len(micro_batches) if call == "forward_backward" else -len(micro_batches)
    try:
        if not micro_batches:
            raise ValueError("a step needs at least one micro-batch")
        for batch in micro_batches:
            trained.check_batch(batch)
        if call == "forward_backward" and trained.pipeline is not None:
            trained.pipeline.check_step(micro_batches)
        # Ranks that share a sequence were given all of it, and each counts its own part.
        tokens = sum(int((trained.cut.part(batch.labels) != IGNORE_INDEX).sum()) for batch in micro_batches)
    except Exception as error:
        problem = error
    peers_differ = _peers_differ(trained.mesh, [] if problem else micro_batches)
    shared = torch.tensor([tokens, int(problem is not None), number, number * number], device=device)
    shared[1] += peers_differ
    dist.all_reduce(shared, group=trained.mesh.group("loss"))
    num_valid_tokens, num_refusals, numbers, squares = shared.tolist()
    if problem is not None:
        raise problem
    if num_refusals and peers_differ.item():
        mesh = trained.mesh
        shared_by = {"tp": "split each matrix", "cp": "split each sequence", "pp": "have the stages of a pipeline"}
        split = [f"the ranks {mesh.ranks(each)} {what}" for each, what in shared_by.items() if mesh.degree(each) > 1]
        raise ValueError(
            f"{' and '.join(split)} between them, so they need the same batches; "
            "they were given different ones: choose data by mesh.coordinate('dp')"
        )
    if num_refusals:
        raise ValueError(f"{num_refusals} other ranks refused their batches; their message says why")
    if squares * trained.mesh.degree("loss") != numbers * numbers:
        raise ValueError(
            f"every rank must bring as many micro-batches, to the same call; this one brought {len(micro_batches)} to "
            f"{call}, the mean over ranks is {abs(numbers) / trained.mesh.degree('loss'):.2f}: pad the short ones with "
            "batches whose labels are all ignored, or stop together with while_all_have_data"
        )
    return int(num_valid_tokens)


def _peers_differ(mesh: Mesh, micro_batches: Sequence[Batch]) -> Tensor:
    """Whether ranks that should hold the same micro-batches do not, a bool scalar."""
    peers = [view for view in ("cp", "tp", "pp") if mesh.degree(view) > 1]
    differ = torch.tensor(False, device=mesh.device)
    if not peers:
        return differ
    digest = torch.tensor(len(micro_batches), device=mesh.device)
    for batch in micro_batches:
        for ids in (batch.tokens, batch.labels, batch.positions, batch.document_ids):
            part = 0 if ids is None else hash_bits(ids).to(mesh.device) + ids.shape[0]
            digest = digest * 0x5851F42D4C957F2D + part
    for view in peers:
        differ = differ | differ_between_ranks(digest, mesh.group(view))
        # So that ranks along the next view hear of it too.
        digest = digest + differ
    return differ


def _total(trained: "Trained", losses: list[Tensor], num_valid_tokens: int) -> StepResult:
    total = torch.stack(losses).sum(dtype=torch.float64)
    dist.all_reduce(total, group=trained.mesh.group("loss"))
    return StepResult(loss_sum=total.item(), num_valid_tokens=num_valid_tokens)
