"""Takes a step of a recipe under a meter of memory and a counter of collectives."""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from parallel import Batch, CollectiveCounter, Mesh, Trained
from parallel.context_parallel import AllGatherCore
from parallel.counter import Collective
from parallel.ledger.live import LiveBytes, LiveMeter
from parallel.ledger.states import Moments
from parallel.ledger.trace import MemoryMeter
from parallel.traits import TRAITS
from recipes.ledger.optimizers import optimizer_factory
from recipes.ledger.routing import EvenRouting
from recipes.model import build_model
from recipes.recipe import Recipe

WARM_STEPS = 1
WARM_STEPS_OF_BUCKETS = 4
"""Steps before the measured ones: they make the optimizer's state, and DDP agrees on its buckets in them."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """What one rank held and sent in a step.

    Attributes:
        rest_bytes: All tensors between steps, gradients freed.
        after_forward_bytes: At the end of the first forward; None with a pipeline.
        after_backward_bytes: At the end of the last backward.
        peak_bytes: Most of the whole step: forward, backward, clipping and the optimizer.
        at_peak: What of them are model states.
        states: Model states at rest, at the end of the first forward (with a pipeline: of the step), and of the last
            backward.
        collectives: What it sent, in order.
        first_micro_batch: Which of them are the first micro-batch's; none with a pipeline.
        num_ops: Ops of the step.
    """

    rest_bytes: int
    after_forward_bytes: int | None
    after_backward_bytes: int
    peak_bytes: int
    at_peak: LiveBytes
    states: Moments
    collectives: tuple[Collective, ...]
    first_micro_batch: range
    num_ops: int

    @property
    def activation_bytes_at_peak(self) -> int:
        """Activations, temporaries and buffers of collectives at the peak: all that is no model state."""
        held = self.at_peak
        states = held.parameters + held.unsharded + held.gradients + held.optimizer_state
        return self.peak_bytes - states


class TracedRun:
    """A recipe on one rank, whose every tensor is followed from the first on."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        fill: Callable[[Trained], None],
        num_micro_batches: int,
        modes: Callable[[], AbstractContextManager[Any]] = nullcontext,
        optimizer: str = "adamw",
    ) -> None:
        """Builds the model and its optimizer.

        Args:
            recipe: With its layout.
            mesh: Of that layout.
            fill: Gives the parameters memory, such as `materialize`.
            num_micro_batches: Micro-batches of a step.
            modes: What tensors are made under; real ones by default.
            optimizer: One of `OPTIMIZERS`.
        """
        self._recipe, self._modes = recipe, modes
        self.trained = build_model(recipe, mesh)
        if self.trained.loss_scale is not None:
            # A step that overflows is skipped, and an optimizer that took none has no state.
            self.trained.loss_scale.value = 1.0
        for module in self.trained.source.modules():
            if isinstance(module, AllGatherCore):
                module.causal_mask = _unseen(module.causal_mask)
        self.meter, self._counter = MemoryMeter(mesh.device), CollectiveCounter(mesh)
        with self._followed():
            fill(self.trained)
            self.optimizer: Optimizer = self.trained.build_optimizer(optimizer_factory(optimizer, recipe.optimizer))
            self.micro_batches = made_up_batches(recipe, mesh.device, num_micro_batches)

    def trace(self) -> TracedStep:
        """One step, taken twice: the second time stops where most memory was held, and looks at what it is."""
        has_buckets = TRAITS[self.trained.config.data_parallel].has_buckets
        num_warm = WARM_STEPS_OF_BUCKETS if has_buckets else WARM_STEPS
        with self._followed():
            for _ in range(num_warm):
                self.step()
            self.rest()
            # What earlier steps have left in cycles is no part of this one.
            gc.collect()
            rest_bytes = self.meter.live_bytes
            seen: list[int] = []
            self.meter.start()
            self._counter.records.clear()
            with self._counter, self._bounds() as bounds:
                self.step(lambda: seen.append(self.meter.live_bytes))
            first = self.meter.peak_bytes, self.meter.peak_op, self.meter.num_ops
            self.rest()
            states = LiveMeter(self.trained, self.optimizer)
            held: list[LiveBytes] = []
            moments = [states.measure()]
            self.meter.start(at_op=first[1], call=lambda: held.append(states.measure()))
            self.step(lambda: moments.append(states.measure()))
        return TracedStep(
            rest_bytes=rest_bytes,
            after_forward_bytes=seen[0] if len(seen) > 1 else None,
            after_backward_bytes=seen[-1],
            peak_bytes=first[0],
            at_peak=held[0],
            states=Moments(rest=moments[0], after_forward=moments[1], after_backward=moments[-1]),
            collectives=tuple(self._counter.records),
            first_micro_batch=range(*bounds[:2]),
            num_ops=first[2],
        )

    @contextmanager
    def _followed(self) -> Iterator[None]:
        """Follows what is made in the meantime."""
        with ExitStack() as stack:
            stack.enter_context(self._modes())
            stack.enter_context(self.meter)
            if self._recipe.model.shape.num_experts:
                stack.enter_context(EvenRouting())
            yield

    def rest(self) -> None:
        """Frees gradients, as the next step will."""
        for parameter in self.trained.named_parameters().values():
            parameter.grad = None

    @contextmanager
    def _bounds(self) -> Iterator[list[int]]:
        """How many collectives there were before and after each micro-batch."""
        bounds: list[int] = []
        backend = self.trained.backend
        run = backend.run_micro_batch

        def noted(*args: Any, **kwargs: Any) -> None:
            bounds.append(len(self._counter.records))
            run(*args, **kwargs)
            bounds.append(len(self._counter.records))

        backend.run_micro_batch = noted  # type: ignore[method-assign]
        yield bounds
        backend.run_micro_batch = run  # type: ignore[method-assign]
        bounds += [0, 0] * (not bounds)

    def step(self, note: Callable[[], None] = lambda: None) -> None:
        """One step.

        Args:
            note: Called after each forward and after the last backward.
        """
        hook = self.trained.model.register_forward_hook(lambda *_: note())
        self.trained.forward_backward(self.micro_batches)
        hook.remove()
        note()
        self.trained.clip_gradients(self._recipe.training.max_gradient_norm)
        self.optimizer.step()


def _unseen(make: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's causal masks are made of a tensor that no mode may have seen; they hold nothing."""
    # Private: there is no public way to leave all modes.
    from torch.utils._python_dispatch import _disable_current_modes

    @functools.wraps(make)
    def unseen(*sizes: int) -> Any:
        with _disable_current_modes():
            return make(*sizes)

    return unseen


def made_up_batches(recipe: Recipe, device: torch.device, count: int) -> list[Batch]:
    """Micro-batches of the recipe's shape, all tokens alike: nothing that is held or sent depends on their values.

    Args:
        recipe: What is trained.
        device: Where they lie.
        count: How many.
    """
    shape = recipe.training.micro_batch, recipe.data.sequence_length
    # Of a float, so that a step without values has none of these either, masks of whole sequences least of all.
    blank = torch.empty(0, device=device)

    def zeros() -> torch.Tensor:
        return blank.new_zeros(shape, dtype=torch.int64)

    def labels() -> torch.Tensor:
        """It counts which of them are valid, by expert, and reads the counts."""
        return torch.zeros(shape, dtype=torch.int64, device=device)

    documents = not recipe.data.attend_across_documents
    return [
        Batch(tokens=zeros(), labels=labels(), positions=zeros(), document_ids=zeros() if documents else None)
        for _ in range(count)
    ]
