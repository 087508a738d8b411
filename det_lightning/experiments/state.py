"""The state of an experiment and its trials, computed from the events of the log."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any

from det_lightning.files.strict_json import as_number


class Progress:
    """The progress of a run or an experiment, as reported from time to time: from 0 to 1, None before a report."""

    def __init__(self) -> None:
        self.fraction: float | None = None
        self._at_s = 0.0
        self._first_fraction = 0.0
        self._first_at_s = 0.0

    def report(self, fraction: float, at_s: float) -> None:
        """Note the progress at a time, in seconds."""
        if self.fraction is None:
            self._first_fraction = fraction
            self._first_at_s = at_s
        if self.fraction is None or fraction != self.fraction:
            self.fraction = fraction
            self._at_s = at_s

    def time_left_s(self, now_s: float) -> float | None:
        """Return the seconds left at the average speed so far; None if unknown, as after a single report."""
        if self.fraction is None or self.fraction <= self._first_fraction or self._at_s <= self._first_at_s:
            return None
        speed = (self.fraction - self._first_fraction) / (self._at_s - self._first_at_s)
        return max((1 - self.fraction) / speed - (now_s - self._at_s), 0.0)


class TrialStatus(str, enum.Enum):
    """The activity of a trial, in Determined's terms where possible."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    CANCELED = "CANCELED"

    @property
    def is_final(self) -> bool:
        return self in (TrialStatus.COMPLETED, TrialStatus.ERROR, TrialStatus.CANCELED)


@dataclasses.dataclass(frozen=True)
class Validation:
    """The metrics of a validation, and the number of batches trained before."""

    steps_completed: int
    metrics: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A completely written checkpoint of a trial, and the time of the report.

    ``sha256`` are the hashes of the files with objects; by these hashes, the trial recognizes its own files.
    """

    checkpoint_id: str
    trial_id: int
    steps_completed: int
    time: float
    sha256: tuple[str, ...] = ()


@dataclasses.dataclass
class TrialRecord:
    """A trial."""

    trial_id: int
    trial_seed: int
    hparams: dict[str, Any]
    validate_at: list[int]
    status: TrialStatus = TrialStatus.QUEUED
    runs: int = 0  # number of starts
    restarts: int = 0  # number of failures with another start
    lines_read: int = 0  # lines of metrics.jsonl that are in the log
    steps_completed: int = 0  # batches trained, as far as reported
    progress: Progress = dataclasses.field(default_factory=Progress)  # of the latest run; not in the log
    is_open: bool = False  # whether a run was started and is not known to have ended
    started_from: int = -1  # batches of the newest checkpoint when the run began; -1 without one
    orphaned: bool = False  # whether the runner was killed, and the supervisor has asked the run to end
    stop_requested: bool = False
    stop_error: str | None = None
    invalid_hp: bool = False
    preempted: bool = False  # whether the run reported an end on request
    ended_by_hook: bool = False  # whether the run ended in startup-hook.sh
    reason: str | None = None  # why the latest run failed, or the trial ended
    validations: dict[int, Validation] = dataclasses.field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = dataclasses.field(default_factory=dict)
    started_at: float | None = None
    ended_at: float | None = None

    def newest_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to resume from; None if there is none."""
        return max(self.checkpoints.values(), key=lambda checkpoint: checkpoint.steps_completed, default=None)

    def steps_saved(self) -> int:
        """Return the number of batches of the newest checkpoint; -1 without a checkpoint."""
        newest = self.newest_checkpoint()
        return -1 if newest is None else newest.steps_completed


class ExperimentState:
    """The state after the events so far; ``metric`` is the searcher's."""

    def __init__(self, metric: str, smaller_is_better: bool, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.metric = metric
        self.smaller_is_better = smaller_is_better
        self.trials: dict[int, TrialRecord] = {}
        #: How many reports of validations there were in all trials.
        self.validation_reports = 0
        self.started_at: float | None = None
        self.outcome: str | None = None
        self.messages: list[str] = []
        #: Whether all trials are asked to save and end.
        self.pausing = False
        for event in events:
            self.apply(event)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take another event into account; events of unknown types change at most ``lines_read``."""
        self.started_at = event.get("time") if self.started_at is None else self.started_at
        handler = getattr(self, f"on_{event['type']}", None)
        if handler is not None:
            handler(event)
        if "lines" in event:
            self.trials[event["trial"]].lines_read = event["lines"]

    def find_metric(self, validation: Validation | None) -> float | None:
        """Return the searcher's metric of a validation; None without a number of this name."""
        return None if validation is None else as_number(validation.metrics.get(self.metric))

    def metric_at(self, checkpoint: Checkpoint) -> float | None:
        """Return the searcher's metric of the validation at the same batch as a checkpoint; None if there was none."""
        validations = self.trials[checkpoint.trial_id].validations
        return self.find_metric(validations.get(checkpoint.steps_completed))

    def find_best(self, trial: TrialRecord) -> float | None:
        """Return the best value of the searcher's metric in a trial."""
        return self.best(self.find_metric(validation) for validation in trial.validations.values())

    def best(self, values: Iterable[float | None]) -> float | None:
        """Return the best of several values of the searcher's metric; None if there is none."""
        known = [value for value in values if value is not None and not math.isnan(value)]
        if not known:
            return None
        return min(known) if self.smaller_is_better else max(known)

    def pause_queued(self) -> None:
        """Mark the queued trials as paused, because there is no runner any more."""
        for trial in self.trials.values():
            if trial.status is TrialStatus.QUEUED:
                trial.status = TrialStatus.PAUSED

    # One method for each type of event

    def on_trial_created(self, event: Mapping[str, Any]) -> None:
        trial_id = event["trial"]
        self.trials[trial_id] = TrialRecord(trial_id, event["seed"], event["hparams"], event.get("validate_at", []))

    def on_run_started(self, event: Mapping[str, Any]) -> None:
        trial = self.trials[event["trial"]]
        trial.runs = event["run"]
        trial.is_open = True
        trial.started_from = trial.steps_saved()
        trial.orphaned = False
        trial.preempted = False
        trial.ended_by_hook = False
        trial.progress = Progress()
        trial.status = TrialStatus.STOPPING if trial.stop_requested else TrialStatus.RUNNING
        trial.started_at = trial.started_at or event["time"]

    def on_validation(self, event: Mapping[str, Any]) -> None:
        trial = self.trials[event["trial"]]
        steps = event["steps_completed"]
        trial.validations[steps] = Validation(steps, event["metrics"])
        self.validation_reports += 1
        trial.steps_completed = max(trial.steps_completed, steps)

    def on_validation_extended(self, event: Mapping[str, Any]) -> None:
        steps = event["steps_completed"]
        validations = self.trials[event["trial"]].validations
        known = validations[steps].metrics if steps in validations else {}
        validations[steps] = Validation(steps, {**known, **event["metrics"]})
        self.validation_reports += 1

    def on_checkpoint(self, event: Mapping[str, Any]) -> None:
        trial = self.trials[event["trial"]]
        steps = event["steps_completed"]
        checkpoint_id = event["checkpoint_id"]
        digests = tuple(event.get("sha256", ()))
        trial.checkpoints[checkpoint_id] = Checkpoint(checkpoint_id, trial.trial_id, steps, event["time"], digests)
        trial.steps_completed = max(trial.steps_completed, steps)

    def on_checkpoint_deleted(self, event: Mapping[str, Any]) -> None:
        self.trials[event["trial"]].checkpoints.pop(event["checkpoint_id"], None)

    def on_early_exit(self, event: Mapping[str, Any]) -> None:
        self.trials[event["trial"]].invalid_hp |= event["reason"] == "INVALID_HP"

    def on_preempted(self, event: Mapping[str, Any]) -> None:
        self.trials[event["trial"]].preempted = True

    def on_startup_hook_ended_the_run(self, event: Mapping[str, Any]) -> None:
        self.trials[event["trial"]].ended_by_hook = True

    def on_stop_requested(self, event: Mapping[str, Any]) -> None:
        trial = self.trials[event["trial"]]
        trial.stop_requested = True
        trial.stop_error = event.get("error")
        if trial.status is TrialStatus.RUNNING:
            trial.status = TrialStatus.STOPPING

    def on_run_ended(self, event: Mapping[str, Any]) -> None:
        trial = self.trials[event["trial"]]
        trial.is_open = False
        trial.restarts += bool(event["failed"]) and event["closed"] is None
        trial.reason = event["reason"]
        trial.steps_completed = max(trial.steps_completed, event.get("steps_completed", 0))
        if event["closed"] is None:
            trial.status = TrialStatus.PAUSED if event["paused"] else TrialStatus.QUEUED
        else:
            trial.status = TrialStatus(event["closed"])
            trial.ended_at = event["time"]

    def on_trial_retried(self, event: Mapping[str, Any]) -> None:
        trial = self.trials[event["trial"]]
        trial.status = TrialStatus.QUEUED
        trial.restarts = 0
        trial.invalid_hp = False
        trial.reason = trial.ended_at = None
        if trial.stop_error is not None:  # otherwise the search no longer needs the trial
            trial.stop_requested = False
            trial.stop_error = None

    def on_experiment_resumed(self, event: Mapping[str, Any]) -> None:
        self.outcome = None
        for trial in self.trials.values():
            if not trial.status.is_final and not trial.is_open:
                trial.status = TrialStatus.QUEUED

    def on_experiment_ended(self, event: Mapping[str, Any]) -> None:
        self.outcome = event["outcome"]

    def on_message(self, event: Mapping[str, Any]) -> None:
        self.messages.append(event["text"])
