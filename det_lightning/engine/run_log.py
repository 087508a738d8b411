"""The log of a run at level INFO: the device and processes, metrics and speed."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.core._metrics import select_scalars
from det_lightning.engine.events import overrides
from det_lightning.escaping import get_logger
from det_lightning.pytorch._data import data_length
from det_lightning.pytorch._legacy_trial import original_trial
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial

logger = get_logger(__name__)


@dataclasses.dataclass
class LoggedWorkload:
    """Notes about a workload: the time of the beginning, and the numbers of records in the batches."""

    lengths: list[Any] = dataclasses.field(default_factory=list)
    since_s: float = dataclasses.field(default_factory=time.perf_counter)


class RunLog:
    """Logs the facts of one run, on the chief. Unless the log is ``enabled``, nothing is counted or timed."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        self.enabled = logger.isEnabledFor(logging.INFO) and context.distributed.rank == 0
        self._trial = trial
        self._context = context
        #: What was noted about the workload, for :meth:`report_training`.
        self.workload = LoggedWorkload()
        self._validates_since_s = 0.0

    def begin(self, batches_trained: int, resume: CheckpointContent | None) -> None:
        """Log the trial and the place of its training."""
        if not self.enabled:
            return
        size = self._context.distributed.size
        processes = "1 process" if size == 1 else f"{size} processes"
        origin = f", resumed from checkpoint {resume.name}" if resume is not None else ""
        logger.info(
            "Training %s on %s, %s, from batch %d%s.",
            type(original_trial(self._trial)).__name__,
            self._context.device,
            processes,
            batches_trained,
            origin,
        )

    def counter(self) -> Callable[[Any], Any] | None:
        """Return a function to call with each trained batch, or None if there is nothing to call."""
        if self._trial_counts_itself():
            length_of: Callable[[Any], Any] = self._trial.get_batch_length
        elif self.enabled:
            length_of = _length_if_known
        else:
            return None
        if not self.enabled:
            return length_of
        return lambda batch: self.workload.lengths.append(length_of(batch))

    def validation_counter(self) -> Callable[[Any], int] | None:
        """Return a function for counting the records of each evaluated batch, or None if nothing needs the count."""
        if self._trial_counts_itself():
            return self._trial.get_batch_length
        return data_length if self.enabled else None

    def _trial_counts_itself(self) -> bool:
        """Return whether the trial overrides ``get_batch_length``, perhaps with side effects."""
        return overrides(original_trial(self._trial), PyTorchTrial, "get_batch_length")

    def report_training(
        self, batches_trained: int, metrics: dict[str, Any], workload: LoggedWorkload, batches: int
    ) -> None:
        """Log the averages of a workload of ``batches`` batches."""
        if self.enabled:
            speed = self._describe_speed(time.perf_counter() - workload.since_s, workload.lengths, batches)
            logger.info("Training after %d batches: %s%s.", batches_trained, _describe(metrics), speed)

    def begin_validation(self) -> None:
        """Begin to time a validation."""
        self._validates_since_s = time.perf_counter()

    def end_validation(self, batches_trained: int, metrics: dict[str, Any], lengths: list[Any]) -> None:
        """Log the metrics of a validation; ``lengths`` holds the number of records of each batch on this rank."""
        if self.enabled:
            speed = self._describe_speed(time.perf_counter() - self._validates_since_s, lengths, len(lengths))
            logger.info("Validation after %d batches: %s%s.", batches_trained, _describe(metrics), speed)

    def _describe_speed(self, duration_s: float, lengths: list[Any], batches: int) -> str:
        """Return the speed of all ranks, on the assumption that every rank does as much as this rank."""
        if not batches or duration_s <= 0:
            return ""
        size = self._context.distributed.size
        counts = {"batches": batches * size}
        if len(lengths) == batches and all(isinstance(length, int) for length in lengths):
            counts = {"records": sum(lengths) * size, **counts}
        done = ", ".join(f"{count} {unit} ({count / duration_s:.4g} {unit}/s)" for unit, count in counts.items())
        return f"; {done} in {duration_s:.3g} s"


def _length_if_known(batch: Any) -> int | None:
    try:
        return data_length(batch)
    except (TypeError, ValueError):  # only the log needs the number, and can do without
        return None


def _describe(metrics: dict[str, Any]) -> str:
    scalars = select_scalars(metrics, leave_out=("batches", "epochs"))
    return ", ".join(f"{name}={value:.6g}" for name, value in scalars.items()) or "no metrics that are numbers"
