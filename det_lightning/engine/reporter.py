"""The interface of whatever takes the metrics of a run: loggers, TensorBoard files, the search of an experiment."""

from __future__ import annotations

from typing import Any, Protocol


class Reporter(Protocol):
    """Takes the metrics of a run, on the chief."""

    def report_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Take the metrics of a workload that ended after ``steps_completed`` batches."""

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Take the metrics of a validation after ``steps_completed`` batches."""
