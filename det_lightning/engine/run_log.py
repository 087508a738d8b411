"""What a run logs: at level INFO where it trains, its metrics and its speed; and once each, warnings."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from det_lightning.checkpoint.format.content import CheckpointContent, TrialState
from det_lightning.core._metrics import scalars_of
from det_lightning.engine.events import overrides
from det_lightning.engine.schedule import Schedule
from det_lightning.hyperparameters import flat
from det_lightning.pytorch._data import data_length
from det_lightning.pytorch._legacy_trial import original_trial
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial

logger = logging.getLogger(__name__)

_NOT_GIVEN = object()
_MOST_CHARS = 1000


@dataclasses.dataclass
class LoggedWorkload:
    """What is noted about a workload: when it began, and how many records each of its batches has."""

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

    def begin(self, trial_name: str, batches_trained: int, resume: CheckpointContent | None) -> None:
        """Log what is trained, and where."""
        if not self.enabled:
            return
        size = self._context.distributed.size
        processes = "1 process" if size == 1 else f"{size} processes"
        origin = f", resumed from checkpoint {resume.name}" if resume is not None else ""
        logger.info(
            "Training %s on %s, %s, from batch %d%s.",
            trial_name,
            self._context.device,
            processes,
            batches_trained,
            origin,
        )

    def begin_workload(self) -> None:
        """Begin to count and to time."""
        self.workload = LoggedWorkload()

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
        """Return a function that counts the records of each evaluated batch, or None if nothing needs the count."""
        if self._trial_counts_itself():
            return self._trial.get_batch_length
        return data_length if self.enabled else None

    def _trial_counts_itself(self) -> bool:
        """Return whether the trial overrides ``get_batch_length``, which may have side effects."""
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
        """Return how much was done in a time, on the assumption that every rank does as much as this one."""
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
    except (TypeError, ValueError):  # only the log needs the number, and can leave it out
        return None


def _describe(metrics: dict[str, Any]) -> str:
    scalars = scalars_of(metrics, leave_out=("batches", "epochs"))
    return ", ".join(f"{name}={value:.6g}" for name, value in scalars.items()) or "no metrics that are numbers"


class RunWarnings:
    """A reporter that watches one run, and logs each kind of warning at most once, on the chief only."""

    def __init__(self, trial_name: str, context: PyTorchTrialContext, schedule: Schedule) -> None:
        self._trial_name = trial_name
        self._context = context
        self._schedule = schedule
        self._is_chief = context.distributed.rank == 0
        self._first_batch = 0
        self._steps_before = 0
        self._knows_of_steps = False
        self._warned_of_nan = False

    def begin(self, state: TrialState, resume: CheckpointContent | None) -> None:
        """Look at the settings of a run, after its checkpoint, if any, is loaded."""
        self._first_batch = state.batches_trained
        self._steps_before = self._context.optimizer_steps
        for period in self._schedule.periods_below_one():
            self._warn(f"{period} is below 1, which means after every one; leave it out for never.")
        if resume is not None:
            before = _hparams_of(resume)
            now = self._context.settings.to_plain()["hparams"] or {}
            differences = [] if before is None else [*_differences(before, now)]
            if differences:
                self._warn(f"The hparams differ from those of checkpoint {resume.name}: {_join(differences)}.")
        if self._schedule.is_complete(state):
            done = f"{state.batches_trained} batches and {state.epochs_trained} epochs"
            origin = "" if resume is None else f" (checkpoint {resume.name})"
            length = "test_mode" if self._schedule.test_mode else f"max_length={self._schedule.max_length}"
            self._warn(
                f"Nothing is trained: {length} is reached after {done}{origin}. To continue, give a larger max_length, "
                "which counts from the first batch of the first run."
            )

    def report_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        frequency = self._context.aggregation_frequency
        if not self._knows_of_steps and steps_completed // frequency > self._first_batch // frequency:
            self._knows_of_steps = True
            if self._context.optimizer_steps == self._steps_before:
                self._warn(
                    f"{self._trial_name}.train_batch() did not call context.step_optimizer() in the first "
                    f"{steps_completed - self._first_batch} batches, so no weights were updated. Call it for each "
                    "optimizer, after context.backward(loss)."
                )
        first = steps_completed - len(batch_metrics)
        for name in _nan_losses(avg_metrics):
            where = [first + index for index, metrics in enumerate(batch_metrics) if _has_nan(metrics.get(name))]
            since = f", first for batch {where[0]} (the first one is 0)" if where else ""
            self._warn_of_nan(f"The training metric {name!r} is NaN{since}")

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        for name in _nan_losses(metrics):
            self._warn_of_nan(f"The validation metric {name!r} is NaN after {steps_completed} batches")

    def _warn_of_nan(self, found: str) -> None:
        if not self._warned_of_nan:
            self._warned_of_nan = True
            self._warn(
                f"{found}. Weights that are updated by it become NaN too. Try a smaller learning rate or clip_grads=, "
                "and look for NaN in the data. There is no further warning in this run."
            )

    def _warn(self, message: str) -> None:
        if self._is_chief:
            logger.warning("%s", message)


def _nan_losses(metrics: dict[str, Any]) -> list[str]:
    return [name for name, value in metrics.items() if "loss" in str(name).lower() and _has_nan(value)]


def _has_nan(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "f" and bool(np.isnan(value).any())


def _hparams_of(content: CheckpointContent) -> dict[str, Any] | None:
    """Return the hyperparameters of the run that wrote a checkpoint; None if they are unknown."""
    settings = None if content.resume is None else content.resume.settings
    for source in (settings, content.load_data):
        found = (source or {}).get("hparams")
        if isinstance(found, dict):
            return found
    return None


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    old = flat(before)
    new = flat(now)
    for name in dict.fromkeys([*old, *new]):
        was = old.get(name, _NOT_GIVEN)
        is_now = new.get(name, _NOT_GIVEN)
        # NaN is not equal to itself.
        if was != is_now and repr(was) != repr(is_now):
            yield f"{name} was {_shown(was)}, and is {_shown(is_now)}"


def _shown(value: Any) -> str:
    return "not given" if value is _NOT_GIVEN else f"{value!r:.100}"


def _join(parts: list[str]) -> str:
    text = "; ".join(parts)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} ... ({len(parts)} in all)"
