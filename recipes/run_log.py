"""Tells console and sinks what a run does, step by step, and sums it up."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from parallel import Mesh
from recipes.metrics import EvaluationMetrics, MetricsSink, Reporter, StepMetrics, peak_bytes


@dataclass(frozen=True, kw_only=True)
class TrainSummary:
    """What a run did, the same on every rank.

    Attributes:
        mesh: The layout in a few words.
        first_step: Optimizer steps done before it.
        last_step: Optimizer steps done after it.
        first_loss: Loss of its first step, in nats a token.
        last_loss: Loss of its last step.
        held_out_loss: Loss on held-out text after it; None without such text.
        tokens_per_s: Valid tokens a second over all ranks, by the median step.
        peak_bytes: Peak memory of the fullest rank.
        save_s: Seconds that training stood still for the last checkpoint.
        load_s: Seconds that loading took; None for a new run.
        stopped_by: Name of the signal that ended it early.
    """

    mesh: str
    first_step: int
    last_step: int
    first_loss: float
    last_loss: float
    held_out_loss: float | None
    tokens_per_s: float
    peak_bytes: int
    save_s: float
    load_s: float | None
    stopped_by: str | None = None


class RunLog:
    """Tells console and sinks what happened, and sums it up."""

    def __init__(self, reporter: Reporter, sinks: Sequence[MetricsSink], first_step: int) -> None:
        """Starts with nothing done.

        Args:
            reporter: The console.
            sinks: Where metrics go beside it; none on ranks other than 0.
            first_step: Optimizer steps done before.
        """
        self._reporter, self._sinks = reporter, sinks
        self._first_step, self._steps = first_step, list[StepMetrics]()
        self._held_out_loss: float | None = None
        self._save_s = 0.0
        self._stopped_by: str | None = None

    def step(self, metrics: StepMetrics) -> None:
        """Takes note of a step."""
        self._steps.append(metrics)
        self._reporter.step(metrics)
        for sink in self._sinks:
            sink.write(metrics)

    def evaluation(self, metrics: EvaluationMetrics | None) -> None:
        """Takes note of an evaluation, if there was one."""
        if metrics is None:
            return
        self._held_out_loss = metrics.loss
        self._reporter.evaluation(metrics)
        for sink in self._sinks:
            sink.write(metrics)

    def saved(self, path: Path, time_s: float) -> None:
        """Takes note of a checkpoint.

        Args:
            path: Where it is.
            time_s: Seconds that training stood still for it.
        """
        self._save_s = time_s
        self._reporter.message(f"saved {path}; training stood still for {time_s:.2f} s")

    def stopped(self, number: signal.Signals, step: int) -> None:
        """Takes note of a signal that ended the run.

        Args:
            number: The signal.
            step: The last step, which is saved.
        """
        self._stopped_by = number.name
        self._reporter.message(f"stopped by {number.name} after step {step}, which is saved; the same command goes on")

    def summary(self, mesh: Mesh, load_s: float | None) -> TrainSummary:
        """What the run did; every rank calls this together."""
        peak = torch.tensor(peak_bytes(mesh.device), device=mesh.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        rates = sorted(each.tokens_per_s for each in self._steps)
        return TrainSummary(
            mesh=mesh.describe(),
            first_step=self._first_step,
            last_step=self._steps[-1].step if self._steps else self._first_step,
            first_loss=self._steps[0].loss if self._steps else float("nan"),
            last_loss=self._steps[-1].loss if self._steps else float("nan"),
            held_out_loss=self._held_out_loss,
            tokens_per_s=rates[len(rates) // 2] if rates else 0.0,
            peak_bytes=int(peak.item()),
            save_s=self._save_s,
            load_s=load_s,
            stopped_by=self._stopped_by,
        )
