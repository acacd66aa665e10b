"""The metrics of a run as lines of JSON that survive an interruption."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from recipes.metrics.records import EvaluationMetrics, StepMetrics


class MetricsFile:
    """One JSON object a line, on disk as soon as it is written; rank 0 alone should hold one."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        """Opens the file, its folder made where there is none.

        Args:
            path: The file.
            resumed_step: Step of the checkpoint that the run resumes from: what the file says of later steps, which
                will be run again, is dropped, and so is a line that was cut off. None: a new run, an empty file.

        Raises:
            ValueError: If the file cannot be written.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [] if resumed_step is None or not path.exists() else list(_lines_until(path, resumed_step))
            # By rename, so that a kill at this point loses neither the old lines nor half of one.
            partial = path.with_name(path.name + ".partial")
            partial.write_text("".join(kept), encoding="utf-8")
            os.replace(partial, path)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ValueError(f"cannot write metrics to {str(path)!r}: {error.strerror}") from error

    def write(self, metrics: StepMetrics | EvaluationMetrics) -> None:
        """Appends one line; a number that is not finite becomes null, which every JSON reader takes.

        Args:
            metrics: What to write.

        Raises:
            OSError: If the disk takes no more.
        """
        record = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.record().items()
        }
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
        except OSError as error:
            raise OSError(f"cannot write metrics to {str(self._path)!r}: {error.strerror}; make room there") from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _lines_until(path: Path, step: int) -> Iterator[str]:
    """The whole lines of a metrics file that are of no later step."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step:
            yield line + "\n"
