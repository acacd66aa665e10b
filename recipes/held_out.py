"""The loss of a run on text that it does not train on."""

import time
from collections.abc import Sequence
from typing import cast

from checkpoint import TrainState
from parallel import Batch, Mesh, Trained
from recipes.data import TextData, evaluation_batches
from recipes.metrics import EvaluationMetrics
from recipes.recipe import Recipe


class HeldOut:
    """This rank's share of the held-out text, if there is any."""

    def __init__(self, recipe: Recipe, text: TextData, mesh: Mesh) -> None:
        """Cuts the text into micro-batches.

        Args:
            recipe: What is trained.
            text: Its data.
            mesh: The ranks that share it.
        """
        self._batches: Sequence[Batch] = ()
        if text.held_out is not None:
            self._batches = evaluation_batches(
                text.held_out,
                micro_batch=recipe.training.micro_batch,
                dp_rank=mesh.coordinate("dp"),
                dp_degree=mesh.degree("dp"),
                max_samples=recipe.training.evaluation_sequences or None,
            )

    def evaluate(self, state: TrainState) -> EvaluationMetrics | None:
        """Computes the loss; every rank calls this together.

        Args:
            state: The run's state.

        Returns:
            None without held-out text.
        """
        if not self._batches:
            return None
        start_s = time.perf_counter()
        result = cast(Trained, state.trained).evaluate(self._batches)
        time_s = time.perf_counter() - start_s
        return EvaluationMetrics(step=state.step, loss=result.loss, num_tokens=result.num_valid_tokens, time_s=time_s)
