"""What a run reports, to a file and on the console."""

from recipes.metrics.file import MetricsFile
from recipes.metrics.memory import peak_bytes
from recipes.metrics.records import EvaluationMetrics, StepMetrics, format_bytes
from recipes.metrics.reporter import Reporter

__all__ = ["EvaluationMetrics", "MetricsFile", "Reporter", "StepMetrics", "format_bytes", "peak_bytes"]
