"""The records in a trial's ``metrics.jsonl``: events for the experiment, and curves of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.escaping import escape
from det_lightning.experiments.event_log import MOST_BYTES, find_mistake
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.experiments.trial_process import RecordReader
from det_lightning.files.strict_json import as_number


def note_steps(trial: TrialRecord, record: Mapping[str, Any]) -> None:
    """Update the trial's number of batches from a record, even from a record that is no event."""
    if record["steps_completed"] is not None:
        trial.steps_completed = max(trial.steps_completed, record["steps_completed"])


def read_event(record: Mapping[str, Any], trial: TrialRecord, line: int) -> tuple[str, dict[str, Any]] | None:
    """Return type and entries of the event in a record; None for a record without consequences."""
    steps = record["steps_completed"]
    metrics = record["metrics"]
    at_line = {"trial": trial.trial_id, "lines": line}
    if record["group"] == "validation":
        return _validation(trial, steps, metrics, at_line)
    if record["group"] == "checkpoint":
        known = {name: metrics[name] for name in ("checkpoint_id", "sha256") if name in metrics}
        return "checkpoint", {**at_line, "steps_completed": steps, **known}
    if record["group"] == "checkpoint_deleted":
        return "checkpoint_deleted", {**at_line, **metrics}
    if record["group"] == "early_exit":
        return "early_exit", {**at_line, "reason": metrics["reason"]}
    if record["group"] == "preempted":
        return "preempted", at_line
    return ("startup_hook_ended_the_run", at_line) if record["group"] == "startup_hook" else None


def take_unread_reports(state: ExperimentState, trial: TrialRecord, file: Path) -> None:
    """Apply the reports of a trial that the runner has not noted to the state.

    Raises:
        DamagedExperiment: a line of the file is not a report.
    """
    if not file.is_file() or file.stat().st_size > MOST_BYTES:  # reading a pipe would wait for a writer
        return
    for line, record in RecordReader(file, trial.lines_read).new_records():
        try:
            note_steps(trial, record)
            reported = read_event(record, trial, line)
            event = None if reported is None else {"type": reported[0], "time": record["time"], **reported[1]}
            wrong = None if event is None else find_mistake(event, {trial.trial_id})
        except (KeyError, TypeError):
            wrong = "group, steps_completed, metrics or time"
        if wrong is not None:
            raise errors.DamagedExperiment(
                f"Line {line} of {escape(file)} is not a report of a trial: no usable {wrong}."
            )
        if event is not None:
            state.apply(event)


def read_curves(trial: TrialRecord, file: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the batches and values of each metric of a trial; training metrics are called ``training NAME``."""
    reports: list[tuple[str, Any, Any]] = [("", steps, metrics) for steps, metrics in trial.validations.items()]
    if file.is_file() and file.stat().st_size <= MOST_BYTES:
        records = (record for _, record in RecordReader(file).new_records() if isinstance(record, dict))
        training = (record for record in records if record.get("group") == "training")
        reports += [("training ", record.get("steps_completed"), record.get("metrics")) for record in training]
    curves: dict[str, dict[float, float]] = {}
    for prefix, steps, metrics in reports:
        batch = as_number(steps)
        if batch is None or not isinstance(metrics, dict):
            continue
        for name, value in metrics.items():
            if (number := as_number(value)) is not None:
                curves.setdefault(f"{prefix}{name}", {})[batch] = number  # a restarted trial reports a batch again
    return {name: list(values.items()) for name, values in curves.items()}


def _validation(
    trial: TrialRecord, steps: Any, metrics: dict[str, Any], at_line: dict[str, Any]
) -> tuple[str, dict[str, Any]] | None:
    """Return the first report at a step, or the additions of a later report."""
    values = {**at_line, "steps_completed": steps}
    known = trial.validations.get(steps)
    if known is None:
        return "validation", {**values, "metrics": metrics}
    # A restarted trial repeats the validations after the newest checkpoint.
    added = {name: value for name, value in metrics.items() if name not in known}
    return ("validation_extended", {**values, "metrics": added}) if added else None
