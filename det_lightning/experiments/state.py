"""The state of an experiment and its trials, computed from the events of the log."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any

from det_lightning.escaping import name_some
from det_lightning.files.strict_json import as_number


class Progress:
    """The progress of a run or an experiment, as reported from time to time: from 0 to 1, None before a report."""

    def __init__(self) -> None:
        self.fraction: float | None = None
        self._at_s = 0.0
        self._first_fraction = 0.0
        self._first_at_s = 0.0

    def report(self, fraction: float, at_s: float) -> None:
        """Record the progress at a time, in seconds."""
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
class Checkpoint:
    """A checkpoint of a trial, and when it was reported.

    ``sha256`` are the hashes of its files with objects, by which the trial recognizes its own files.
    ``storage`` is the storage that the trial has chosen in place of the experiment's.
    """

    checkpoint_id: str
    trial_id: int
    steps_completed: int
    time: float
    sha256: tuple[str, ...] = ()
    storage: str | None = None
    is_announced: bool = False  # whether the trial named the checkpoint before completing it


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
    nodes: list[str] = dataclasses.field(default_factory=list)  # the names of the open run's nodes on a cluster
    start: Checkpoint | None = None  # of the trial, from which the latest run started
    steps_saved: int = -1  # batches of the newest checkpoint of the latest run; -1 without one
    orphaned: bool = False  # whether the runner was killed, and the supervisor has asked the run to end
    stop_requested: bool = False
    stop_error: str | None = None
    invalid_hp: bool = False
    preempted: bool = False  # whether the run reported an end on request
    reason: str | None = None  # why the latest run failed, or the trial ended
    validations: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)  # metrics by batches trained
    checkpoints: dict[str, Checkpoint] = dataclasses.field(default_factory=dict)  # reported as complete
    begun: dict[str, Checkpoint] = dataclasses.field(default_factory=dict)  # complete or not
    started_at: float | None = None
    ended_at: float | None = None

    def latest_metrics(self) -> dict[str, Any] | None:
        """Return the metrics of the validation after the most batches; None if there is none."""
        return self.validations[max(self.validations)] if self.validations else None

    def newest_checkpoint(self) -> Checkpoint | None:
        """Return the newest reported checkpoint; None if there is none."""
        return max(self.checkpoints.values(), key=lambda checkpoint: checkpoint.steps_completed, default=None)

    def has_saved_progress(self) -> bool:
        """Return whether the latest run has saved more than it started from."""
        return self.steps_saved > (-1 if self.start is None else self.start.steps_completed)

    # One method for each type of event of a trial

    def on_run_started(self, event: Mapping[str, Any]) -> None:
        self.runs = event["run"]
        self.is_open = True
        # Earlier releases started from the newest checkpoint of their log.
        newest = self.newest_checkpoint()
        start = event.get("checkpoint") if "checkpoint" in event else newest and newest.checkpoint_id
        self.start = self.checkpoints.get(start or "")
        self.steps_saved = -1
        self.orphaned = False
        self.preempted = False
        self.progress = Progress()
        self.status = TrialStatus.STOPPING if self.stop_requested else TrialStatus.RUNNING
        self.started_at = self.started_at or event["time"]

    def on_run_placed(self, event: Mapping[str, Any]) -> None:
        self.nodes = event["nodes"]

    def on_validation(self, event: Mapping[str, Any]) -> None:
        steps = event["steps_completed"]
        self.validations[steps] = event["metrics"]
        self.steps_completed = max(self.steps_completed, steps)

    def on_validation_extended(self, event: Mapping[str, Any]) -> None:
        steps = event["steps_completed"]
        self.validations[steps] = {**self.validations.get(steps, {}), **event["metrics"]}

    def on_checkpoint_begun(self, event: Mapping[str, Any]) -> None:
        begun = dataclasses.replace(self._read_checkpoint(event), storage=event.get("storage"), is_announced=True)
        self.begun[begun.checkpoint_id] = begun

    def on_checkpoint(self, event: Mapping[str, Any]) -> None:
        reported = self._read_checkpoint(event)
        begun = self.begun.pop(reported.checkpoint_id, reported)
        self.checkpoints[reported.checkpoint_id] = dataclasses.replace(begun, time=reported.time)
        self.steps_completed = max(self.steps_completed, reported.steps_completed)
        self.steps_saved = max(self.steps_saved, reported.steps_completed)

    def _read_checkpoint(self, event: Mapping[str, Any]) -> Checkpoint:
        known = event["checkpoint_id"], self.trial_id, event["steps_completed"], event["time"]
        return Checkpoint(*known, tuple(event.get("sha256", ())))

    def on_checkpoint_deleted(self, event: Mapping[str, Any]) -> None:
        self.checkpoints.pop(event["checkpoint_id"], None)
        self.begun.pop(event["checkpoint_id"], None)

    def on_early_exit(self, event: Mapping[str, Any]) -> None:
        self.invalid_hp |= event["reason"] == "INVALID_HP"

    def on_preempted(self, event: Mapping[str, Any]) -> None:
        self.preempted = True

    def on_stop_requested(self, event: Mapping[str, Any]) -> None:
        self.stop_requested = True
        self.stop_error = event.get("error")
        if self.status is TrialStatus.RUNNING:
            self.status = TrialStatus.STOPPING

    def on_run_ended(self, event: Mapping[str, Any]) -> None:
        self.is_open = False
        self.nodes = []
        self.restarts += bool(event["failed"]) and event["closed"] is None
        self.reason = event["reason"]
        self.steps_completed = max(self.steps_completed, event.get("steps_completed", 0))
        if event["closed"] is None:
            self.status = TrialStatus.PAUSED if event["paused"] else TrialStatus.QUEUED
        else:
            self.status = TrialStatus(event["closed"])
            self.ended_at = event["time"]

    def on_trial_retried(self, event: Mapping[str, Any]) -> None:
        self.status = TrialStatus.QUEUED
        self.restarts = 0
        self.invalid_hp = False
        self.reason = self.ended_at = None
        if self.stop_error is not None:  # otherwise the search no longer needs the trial
            self.stop_requested = False
            self.stop_error = None


class ExperimentState:
    """The state after the events so far; ``metric`` is the searcher's."""

    def __init__(self, metric: str, smaller_is_better: bool, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.metric = metric
        self.smaller_is_better = smaller_is_better
        self.trials: dict[int, TrialRecord] = {}
        self.started_at: float | None = None
        self.outcome: str | None = None
        self.messages: list[str] = []
        #: Whether all trials are asked to save and end.
        self.pausing = False
        for event in events:
            self.apply(event)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply another event; events of unknown types change at most ``lines_read``."""
        self.started_at = event.get("time") if self.started_at is None else self.started_at
        name = f"on_{event['type']}"
        for changed in (self, self.trials.get(event.get("trial", 0))):
            if hasattr(changed, name):
                getattr(changed, name)(event)
        if "lines" in event:
            self.trials[event["trial"]].lines_read = event["lines"]

    def find_metric(self, metrics: Mapping[str, Any] | None) -> float | None:
        """Return the searcher's metric among the metrics of a validation; None without a number of this name."""
        return None if metrics is None else as_number(metrics.get(self.metric))

    def metric_at(self, checkpoint: Checkpoint) -> float | None:
        """Return the searcher's metric of the validation at the same batch as a checkpoint; None if there was none."""
        validations = self.trials[checkpoint.trial_id].validations
        return self.find_metric(validations.get(checkpoint.steps_completed))

    def find_best(self, trial: TrialRecord) -> float | None:
        """Return the best value of the searcher's metric in a trial."""
        return self.best(map(self.find_metric, trial.validations.values()))

    def best(self, values: Iterable[float | None]) -> float | None:
        """Return the best of several values of the searcher's metric; None if there is none."""
        known = [value for value in values if value is not None and not math.isnan(value)]
        if not known:
            return None
        return min(known) if self.smaller_is_better else max(known)

    def explain_missing_metric(self) -> str | None:
        """Return a sentence if no trial has reported a number for the searcher's metric; None before any report."""
        found = [metrics for trial in self.trials.values() for metrics in trial.validations.values()]
        if not (found or self.outcome == "COMPLETED") or self.best(map(self.find_metric, found)) is not None:
            return None
        values = {name: value for metrics in found for name, value in metrics.items()}
        if self.metric in values:
            value = repr(values[self.metric])[:80]
            return f"No trial has reported a number for {self.metric}, the metric of the search; one value is {value}."
        what = f"the validations reported {name_some(sorted(values))}" if values else "no validation was reported"
        return f"No trial has reported {self.metric}, the metric of the search; {what}."

    def pause_queued(self) -> None:
        """Mark the queued trials as paused, because there is no runner any more."""
        for trial in self.trials.values():
            if trial.status is TrialStatus.QUEUED:
                trial.status = TrialStatus.PAUSED

    # One method for each other type of event

    def on_trial_created(self, event: Mapping[str, Any]) -> None:
        trial_id = event["trial"]
        self.trials[trial_id] = TrialRecord(trial_id, event["seed"], event["hparams"], event.get("validate_at", []))

    def on_experiment_resumed(self, event: Mapping[str, Any]) -> None:
        self.outcome = None
        for trial in self.trials.values():
            if not trial.status.is_final and not trial.is_open:
                trial.status = TrialStatus.QUEUED

    def on_experiment_ended(self, event: Mapping[str, Any]) -> None:
        self.outcome = event["outcome"]

    def on_message(self, event: Mapping[str, Any]) -> None:
        self.messages.append(event["text"])
