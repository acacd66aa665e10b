"""Takes a step of a recipe as one rank of many, on tensors that have no values."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from parallel import Batch, Mesh, Trained, build_mesh, loss_scale, step
from parallel.ledger.parts import num_reductions
from parallel.materialize import allocate
from parallel.traits import TRAITS
from recipes.dry_run import fake_world
from recipes.ledger.traced import TracedRun, TracedStep, made_up_batches
from recipes.recipe import Recipe

T = TypeVar("T")


def check_fake(recipe: Recipe) -> str | None:
    """Why a step of a recipe cannot be taken without values; None: it can.

    Args:
        recipe: With its layout.
    """
    traits = TRAITS[recipe.parallel.data_parallel]
    if traits.gathers_centrally:
        return "its replicas are threads of one process"
    if traits.flattens or traits.has_buckets:
        return f"{recipe.parallel.data_parallel} wraps parameters once they have values, and there are none"
    if recipe.model.shape.num_experts:
        return "how many tokens come to an expert depends on their values"
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
    # Private: torch documents it, but has no public name for it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with fake_world(world_size, rank), _quiet():
        mesh = build_mesh(recipe.parallel, "cpu")
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Those in the middle are alike: like the first, or where gradients wait for the last, like the second. The
        # schedule of a pipeline takes them all.
        enough = 3 if num_reductions(mesh.config, num_micro_batches) == 1 else 2
        taken = num_micro_batches if mesh.degree("pp") > 1 else min(num_micro_batches, enough)
        run = TracedRun(recipe, mesh, functools.partial(allocate, clear=False), taken, mode, optimizer)
        with _without_values(recipe):
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


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Where a unit's weights lie is asked of fake tensors too, which all answer 0.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


@contextmanager
def _without_values(recipe: Recipe) -> Iterator[None]:
    """Lets the parts of a step that read values see real ones, or none."""
    # Private: the mode must rest while ranks agree on tokens, which have values.
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    agree, all_reduce = step._agree_on_tokens, dist.all_reduce

    def alike(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        """The other ranks of a fake world hold what this one does."""
        work = all_reduce(tensor, op, group, async_op)
        if op == dist.ReduceOp.SUM:
            tensor *= dist.get_world_size(group)
        return work

    def agree_on_real_tokens(trained: Trained, micro_batches: Sequence[Batch], *, call: Any) -> int:
        with unset_fake_temporarily(), mock.patch.object(dist, "all_reduce", alike):
            return agree(trained, made_up_batches(recipe, trained.mesh.device, len(micro_batches)), call=call)

    def total(trained: Trained, losses: list[Tensor], num_valid_tokens: int) -> step.StepResult:
        dist.all_reduce(torch.stack(losses).sum(dtype=torch.float64), group=trained.mesh.group("loss"))
        return step.StepResult(loss_sum=float("nan"), num_valid_tokens=num_valid_tokens)

    def on_no_rank(flag: Tensor) -> bool:
        """Ranks agree on whether a step overflowed, and it did not."""
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return False

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(step, "_agree_on_tokens", agree_on_real_tokens))
        stack.enter_context(mock.patch.object(step, "_total", total))
        stack.enter_context(mock.patch.object(loss_scale, "_on_any_rank", on_no_rank))
        if hasattr(PipelineStage, "_warmup_backward_result"):
            # Before its first step a schedule asks all stages whether they know their shapes, as they do here.
            yes = mock.Mock(item=lambda: 1)
            stack.enter_context(mock.patch.object(PipelineStage, "_warmup_backward_result", lambda *_, **__: yes))
        yield
