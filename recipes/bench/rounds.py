"""Times contenders in interleaved rounds, so that what else the machine does hits all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Contenders beside the one that they are compared with.

    Attributes:
        title: What is compared.
        times_s: Seconds of one step, by contender and round; the first contender is the reference.
        targets: Largest ratio to the reference that is aimed at, by contender.
    """

    title: str
    times_s: Mapping[str, list[float]]
    targets: Mapping[str, float]

    def median_s(self, name: str) -> float:
        """Median over rounds of a contender's time."""
        return statistics.median(self.times_s[name])

    def ratio(self, name: str, to: str | None = None) -> float:
        """Median over rounds of a contender's time as a share of another's in the same round.

        Args:
            name: The contender.
            to: The other one; None: the reference.
        """
        reference = self.times_s[next(iter(self.times_s)) if to is None else to]
        return statistics.median(mine / theirs for mine, theirs in zip(self.times_s[name], reference, strict=True))

    def table(self) -> Table:
        """The comparison for people."""
        table = Table("contender", "median ms", "quartiles", "ratio", "aim", title=self.title)
        for name, times in self.times_s.items():
            low, median, high = statistics.quantiles(times, n=4, method="inclusive")
            aim = f"<= {self.targets[name]:.2f}" if name in self.targets else ""
            table.add_row(
                name, f"{median * 1e3:.1f}", f"{low * 1e3:.1f} to {high * 1e3:.1f}", f"{self.ratio(name):.3f}", aim
            )
        return table

    def to_json(self) -> dict[str, object]:
        """The comparison as JSON can hold it."""
        ratios = {name: self.ratio(name) for name in self.times_s}
        return {"title": self.title, "times_s": dict(self.times_s), "ratios": ratios, "aims": dict(self.targets)}


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    num_rounds: int,
    steps_of_a_round: int = 3,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Runs every contender once a round, in turns of changing order; ranks of a job call this together.

    Args:
        contenders: What to time, by name; each call is one step.
        num_rounds: Rounds that count; one more, to warm up, goes before.
        steps_of_a_round: Steps of a contender in a round, of which the mean counts.
        prepare: Done before each contender's turn; its time does not count.

    Returns:
        Seconds of one step, by contender and round.
    """
    times_s: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    gc.collect()
    gc.disable()
    try:
        for number in range(num_rounds + 1):
            for name in names if number % 2 else reversed(names):
                prepare()
                if dist.is_initialized():
                    dist.barrier()
                start_s = time.perf_counter()
                for _ in range(steps_of_a_round):
                    contenders[name]()
                if number:
                    times_s[name].append((time.perf_counter() - start_s) / steps_of_a_round)
            gc.collect()
    finally:
        gc.enable()
    return times_s
