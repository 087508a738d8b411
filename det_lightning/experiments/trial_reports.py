"""The records in a trial's ``metrics.jsonl``: events for the experiment, and curves of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from det_lightning.experiments.event_log import find_mistake
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.experiments.trial_process import RecordReader
from det_lightning.files.strict_json import as_number

_CHECKPOINT = ("checkpoint_id", "sha256", "storage")
# The entries of events in the metrics of records, by group.
_ENTRIES = {
    "checkpoint_begun": _CHECKPOINT,
    "checkpoint": _CHECKPOINT,
    "checkpoint_deleted": ("checkpoint_id",),
    "early_exit": ("reason",),
    "message": ("text",),
    "preempted": (),
}


def read_reports(records: RecordReader, trial: TrialRecord) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yield the new records of a trial, each with its event, or None for a record without consequences.

    A record whose event lacks an entry is left out. The number of the trial's batches is updated from each record.
    """
    for line, record in records.new_records():
        event = _make_event(record, trial, line)
        if event is not None and (wrong := find_mistake(event, {trial.trial_id})) is not None:
            records.leave_out(line, f"is not a report of a trial: {record['group']} without a usable {wrong}")
            continue
        trial.steps_completed = max(trial.steps_completed, record["steps_completed"] or 0)
        yield record, event


def _make_event(record: Mapping[str, Any], trial: TrialRecord, line: int) -> dict[str, Any] | None:
    group, steps, metrics = record["group"], record["steps_completed"], record["metrics"]
    event = {"type": group, "time": record["time"], "trial": trial.trial_id, "lines": line}
    if group == "validation":
        known = trial.validations.get(steps)
        if known is None:
            return {**event, "steps_completed": steps, "metrics": metrics}
        # A restarted trial repeats the validations after the newest checkpoint.
        added = {name: value for name, value in metrics.items() if name not in known}
        return {**event, "type": "validation_extended", "steps_completed": steps, "metrics": added} if added else None
    if group not in _ENTRIES:
        return None
    entries = {name: metrics[name] for name in _ENTRIES[group] if name in metrics}
    return {**event, **({"steps_completed": steps} if _ENTRIES[group] is _CHECKPOINT else {}), **entries}


def take_unread_reports(state: ExperimentState, trial: TrialRecord, file: Path) -> None:
    """Apply to the state those reports of a trial that the runner has not noted."""
    if not file.is_file():  # reading a pipe would wait for a writer
        return
    for _, event in read_reports(RecordReader(file, trial.lines_read), trial):
        if event is not None:
            state.apply(event)


def read_curves(trial: TrialRecord, file: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the batches and values of each metric of a trial; training metrics are called ``training NAME``."""
    reports: list[tuple[str, Any, Any]] = [("", steps, metrics) for steps, metrics in trial.validations.items()]
    if file.is_file():
        training = (record for _, record in RecordReader(file).new_records() if record["group"] == "training")
        reports += [("training ", record["steps_completed"], record["metrics"]) for record in training]
    curves: dict[str, dict[float, float]] = {}
    for prefix, steps, metrics in reports:
        batch = as_number(steps)
        if batch is None:
            continue
        for name, value in metrics.items():
            if (number := as_number(value)) is not None:
                curves.setdefault(f"{prefix}{name}", {})[batch] = number  # a restarted trial reports a batch again
    return {name: list(values.items()) for name, values in curves.items()}
