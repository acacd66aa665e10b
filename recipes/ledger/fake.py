"""Takes a step of a recipe as one rank of many, on tensors that have no values."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from parallel import Batch, Mesh, Trained, build_mesh, loss_scale, step
from parallel.ledger.parts import num_reductions
from parallel.materialize import allocate
from parallel.traits import TRAITS
from recipes.dry_run import fake_world
from recipes.ledger.traced import TracedRun, TracedStep, made_up_batches
from recipes.recipe import Recipe
from recipes.without_values import modes_without_values

T = TypeVar("T")


def check_fake(recipe: Recipe, num_devices: int = 1) -> str | None:
    """Why a step of a recipe cannot be taken without values; None: it can.

    Args:
        recipe: With its layout.
        num_devices: GPUs of the process.
    """
    traits = TRAITS[recipe.parallel.data_parallel]
    if traits.gathers_centrally and num_devices > 1:
        return "its replicas are threads of one process"
    if recipe.parallel.compile:
        return "the compiler takes no part in a dry run"
    return None


def fake_step(
    recipe: Recipe,
    world_size: int,
    rank: int,
    num_micro_batches: int,
    look: Callable[[Mesh], T],
    optimizer: str = "adamw",
) -> tuple[TracedStep, T]:
    """Builds the recipe as that rank would and takes its step; no memory is used and nothing is sent.

    Args:
        recipe: What to train and how to split it; `check_fake` has passed it.
        world_size: Ranks of the job.
        rank: The rank to be.
        num_micro_batches: Micro-batches of the step.
        look: What is asked of the mesh.
        optimizer: One of `OPTIMIZERS`.

    Returns:
        The step; what `look` gave.
    """
    with fake_world(world_size, rank):
        mesh = build_mesh(recipe.parallel, "cpu")
        # Those in the middle are alike: like the first, or where gradients wait for the last, like the second. The
        # schedule of a pipeline takes them all.
        enough = 3 if num_reductions(mesh.config, num_micro_batches) == 1 else 2
        taken = num_micro_batches if mesh.degree("pp") > 1 else min(num_micro_batches, enough)
        fill = functools.partial(allocate, clear=False)
        run = TracedRun(recipe, mesh, fill, taken, modes_without_values(), optimizer)
        with _nothing_read(recipe):
            return _with_more(run.trace(), recipe, num_micro_batches - taken), look(mesh)


def _with_more(traced: TracedStep, recipe: Recipe, num_more: int) -> TracedStep:
    """The step with more micro-batches like its first, whose tokens are there from the start."""
    (batch,) = made_up_batches(recipe, torch.device("meta"), 1)
    ids = (batch.tokens, batch.labels, batch.positions, batch.document_ids)
    num_bytes = num_more * sum(each.nbytes for each in ids if each is not None)
    first = traced.first_micro_batch
    after = traced.after_forward_bytes
    return replace(
        traced,
        rest_bytes=traced.rest_bytes + num_bytes,
        after_forward_bytes=None if after is None else after + num_bytes,
        after_backward_bytes=traced.after_backward_bytes + num_bytes,
        peak_bytes=traced.peak_bytes + num_bytes,
        collectives=(*traced.collectives, *traced.collectives[first.start : first.stop] * num_more),
    )


class _Sent:
    """Holds what is sent until the sender lets go of it, as a real send does."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        """It is there already."""


@contextmanager
def _nothing_read(recipe: Recipe) -> Iterator[None]:
    """Lets the parts of a step that read values see real ones, or none."""
    # Private: the mode must rest while ranks agree on tokens, which have values.
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    agree, all_reduce, all_to_all = step._agree_on_tokens, dist.all_reduce, dist.all_to_all_single

    def alike(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        """The other ranks of a fake world hold what this one does."""
        work = all_reduce(tensor, op, group, async_op)
        if op == dist.ReduceOp.SUM:
            tensor *= dist.get_world_size(group)
        return work

    def agree_on_real_tokens(trained: Trained, micro_batches: Sequence[Batch], *, call: Any) -> int:
        with unset_fake_temporarily(), mock.patch.object(dist, "all_reduce", alike):
            return agree(trained, made_up_batches(recipe, trained.mesh.device, len(micro_batches)), call=call)

    def tell_alike(output: Tensor, sent: Tensor, *sizes: Any, **kwargs: Any) -> Any:
        """Numbers of rows are sent to all ranks alike, so a rank gets from each what it sends to itself."""
        work = all_to_all(output, sent, *sizes, **kwargs)
        if not isinstance(sent, FakeTensor):
            output.copy_(sent[dist.get_rank(kwargs["group"])].expand_as(output))
        return work

    def total(trained: Trained, losses: list[Tensor], num_valid_tokens: int) -> step.StepResult:
        dist.all_reduce(torch.stack(losses).sum(dtype=torch.float64), group=trained.mesh.group("loss"))
        return step.StepResult(loss_sum=float("nan"), num_valid_tokens=num_valid_tokens)

    def on_no_rank(flag: Tensor) -> bool:
        """Ranks agree on whether a step overflowed, and it did not."""
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return False

    # Private: by it all schedules send.
    send = schedules._batch_p2p

    def send_and_hold(ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        return [*send(ops, desc), *(_Sent(each.tensor) for each in ops)]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(schedules, "_batch_p2p", send_and_hold))
        stack.enter_context(mock.patch.object(step, "_agree_on_tokens", agree_on_real_tokens))
        stack.enter_context(mock.patch.object(step, "_total", total))
        stack.enter_context(mock.patch.object(dist, "all_to_all_single", tell_alike))
        stack.enter_context(mock.patch.object(loss_scale, "_on_any_rank", on_no_rank))
        if hasattr(PipelineStage, "_warmup_backward_result"):
            # Before its first step a schedule asks all stages whether they know their shapes, as they do here.
            yes = mock.Mock(item=lambda: 1)
            stack.enter_context(mock.patch.object(PipelineStage, "_warmup_backward_result", lambda *_, **__: yes))
        yield
