"""What a run says of one step or one evaluation."""

from collections.abc import Mapping
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
        learning_rates: Learning rate of each group of the optimizer, by name.
        num_tokens: Valid tokens of the global batch.
        tokens_seen: Valid tokens of the run so far.
        step_time_s: Wall time, data and optimizer included.
        peak_bytes: Peak memory so far.
        mfu: Share of what the devices could compute that went into the model; None where their peak is not known.
        skipped: Whether the step left the parameters as they were.
        expert_load: Valid tokens of the global batch that came to each expert, by layer; None for a dense model.
        num_dropped: Of valid tokens how often, over all layers, an expert had no room for one; None for a dense model.
        loss_scale: Scale of the loss for the next step; None: the loss is not scaled.
        num_skipped: Steps of the run that were skipped because scaled gradients overflowed; None as before.
    """

    step: int
    total_steps: int
    epoch: int
    loss: float
    gradient_norm: float
    learning_rates: Mapping[str, float]
    num_tokens: int
    tokens_seen: int
    step_time_s: float
    peak_bytes: int
    mfu: float | None = None
    skipped: bool = False
    expert_load: tuple[tuple[int, ...], ...] | None = None
    num_dropped: int | None = None
    loss_scale: float | None = None
    num_skipped: int | None = None

    @property
    def expert_imbalance(self) -> float | None:
        """Load of the busiest expert over the mean of its layer, in the layer where that is largest; 1: even."""
        loads = [max(layer) * len(layer) / sum(layer) for layer in self.expert_load or () if sum(layer)]
        return max(loads, default=None)

    @property
    def tokens_per_s(self) -> float:
        """Valid tokens a second, over all ranks."""
        return self.num_tokens / self.step_time_s if self.step_time_s > 0 else 0.0

    def line(self) -> str:
        """The step at a glance."""
        width = len(str(self.total_steps))
        mfu = "" if self.mfu is None else f"  mfu {100 * self.mfu:4.1f} %"
        memory = format_bytes(self.peak_bytes)
        scale = "" if self.loss_scale is None else f"  scale {self.loss_scale:g}, {self.num_skipped} skipped"
        return (
            f"step {self.step:>{width}}/{self.total_steps}  loss {self.loss:7.4f}  grad {self.gradient_norm:7.3f}  "
            f"lr {self._rates()}  {_count(self.tokens_per_s):>6} tok/s{mfu}{scale}  "
            f"{self.step_time_s * 1e3:6.0f} ms/step  peak {memory}{'  SKIPPED' if self.skipped else ''}"
        )

    def record(self) -> dict[str, object]:
        """The step as the metrics file holds it."""
        return {
            "kind": "step",
            **asdict(self),
            "tokens_per_s": self.tokens_per_s,
            "expert_imbalance": self.expert_imbalance,
        }

    def scalars(self) -> dict[str, float]:
        """Its numbers by the names that dashboards show."""
        numbers: dict[str, float] = {
            "loss": self.loss,
            "gradient_norm": self.gradient_norm,
            "tokens_per_s": self.tokens_per_s,
            "tokens_seen": self.tokens_seen,
            "epoch": self.epoch,
            "step_time_s": self.step_time_s,
            "peak_bytes": self.peak_bytes,
            **{f"learning_rate/{name}": rate for name, rate in self.learning_rates.items()},
        }
        optional = {
            "mfu": self.mfu,
            "expert_imbalance": self.expert_imbalance,
            "num_dropped": self.num_dropped,
            "loss_scale": self.loss_scale,
            "num_skipped": self.num_skipped,
        }
        numbers |= {name: value for name, value in optional.items() if value is not None}
        return {f"train/{name}": value for name, value in numbers.items()}

    def _rates(self) -> str:
        """One learning rate where all groups have the same, else each with its group."""
        if len(set(self.learning_rates.values())) == 1:
            return f"{next(iter(self.learning_rates.values())):.2e}"
        return " ".join(f"{name} {rate:.2e}" for name, rate in self.learning_rates.items())


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

    def scalars(self) -> dict[str, float]:
        """Its numbers by the names that dashboards show."""
        return {"held_out/loss": self.loss, "held_out/num_tokens": self.num_tokens}


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
