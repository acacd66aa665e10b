"""What a run says of one step or one evaluation."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step.

    Attributes:
        step: Its number, from 1.
        total_steps: Optimizer steps of the run.
        epoch: Epoch of its samples, from 0.
        loss: Nats a valid token, over the global batch.
        gradient_norm: Norm of all gradients before clipping.
        learning_rate: Learning rate of the first group.
        num_tokens: Valid tokens of the global batch.
        tokens_seen: Valid tokens of the run so far.
        step_time_s: Wall time, data and optimizer included.
        peak_bytes: Peak memory so far.
        skipped: Whether the step left the parameters as they were.
    """

    step: int
    total_steps: int
    epoch: int
    loss: float
    gradient_norm: float
    learning_rate: float
    num_tokens: int
    tokens_seen: int
    step_time_s: float
    peak_bytes: int
    skipped: bool = False

    @property
    def tokens_per_s(self) -> float:
        """Valid tokens a second, over all ranks."""
        return self.num_tokens / self.step_time_s if self.step_time_s > 0 else 0.0

    def line(self) -> str:
        """The step at a glance."""
        width = len(str(self.total_steps))
        return (
            f"step {self.step:>{width}}/{self.total_steps}  loss {self.loss:7.4f}  grad {self.gradient_norm:7.3f}  "
            f"lr {self.learning_rate:.2e}  {_count(self.tokens_per_s):>6} tok/s  {self.step_time_s * 1e3:6.0f} ms/step"
            f"  peak {format_bytes(self.peak_bytes)}{'  SKIPPED' if self.skipped else ''}"
        )

    def record(self) -> dict[str, object]:
        """The step as the metrics file holds it."""
        return {"kind": "step", **asdict(self), "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, kw_only=True)
class EvaluationMetrics:
    """One evaluation on held-out text.

    Attributes:
        step: Optimizer steps done before it.
        loss: Nats a valid token, over all ranks.
        num_tokens: Valid tokens evaluated on, over all ranks.
        time_s: Wall time.
    """

    step: int
    loss: float
    num_tokens: int
    time_s: float

    def line(self) -> str:
        """The evaluation at a glance."""
        return f"after step {self.step}: held-out loss {self.loss:.4f} on {self.num_tokens:,} tokens"

    def record(self) -> dict[str, object]:
        """The evaluation as the metrics file holds it."""
        return {"kind": "evaluation", **asdict(self)}


def format_bytes(num_bytes: int) -> str:
    """Bytes for people, in MiB or GiB.

    Args:
        num_bytes: How many.
    """
    mebibytes = num_bytes / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.2f} GiB"


def _count(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"
