"""What a run reports, on the console, to a file and to dashboards."""

from recipes.metrics.config import MetricsConfig
from recipes.metrics.file import MetricsFile
from recipes.metrics.memory import peak_bytes
from recipes.metrics.records import EvaluationMetrics, StepMetrics, format_bytes
from recipes.metrics.reporter import Reporter
from recipes.metrics.sinks import MetricsSink, open_sinks
from recipes.metrics.utilization import Utilization, find_utilization

__all__ = [
    "EvaluationMetrics",
    "MetricsConfig",
    "MetricsFile",
    "MetricsSink",
    "Reporter",
    "StepMetrics",
    "Utilization",
    "find_utilization",
    "format_bytes",
    "open_sinks",
    "peak_bytes",
]
