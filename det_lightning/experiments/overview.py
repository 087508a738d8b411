"""What ``experiment ls`` and ``experiment show`` say about an experiment, from its files alone."""

from __future__ import annotations

import datetime
from typing import Any

from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.event_log import read_events, runner_of
from det_lightning.experiments.state import Checkpoint, ExperimentState, TrialRecord, TrialStatus
from det_lightning.experiments.trial_process import is_running, recorded_status
from det_lightning.experiments.trial_reports import take_unread_reports
from det_lightning.masking import mask


def state_of(directory: ExperimentDirectory) -> ExperimentState:
    """Return the state of an experiment, which may be running.

    What its trials have reported is in it, even if the runner has not noted it yet, or was killed before.
    """
    searcher = directory.config()["searcher"]
    state = ExperimentState(searcher["metric"] or "", searcher["smaller_is_better"], read_events(directory.events))
    is_run = runner_of(directory.events) is not None
    for trial in [trial for trial in state.trials.values() if trial.is_open]:
        take_unread_reports(state, trial, directory.trial(trial.trial_id) / "metrics.jsonl")
        if not is_run:
            trial.status = _status_of_orphan(directory, trial)
    return state


def _status_of_orphan(directory: ExperimentDirectory, trial: TrialRecord) -> TrialStatus:
    """Return what a trial does whose runner was killed: its supervisor has asked it to save and end."""
    folder = directory.trial(trial.trial_id)
    if is_running(folder):
        return TrialStatus.STOPPING
    is_done = recorded_status(folder, trial.runs) == 0 and not trial.preempted
    return TrialStatus.COMPLETED if is_done else TrialStatus.PAUSED


def summary_of(directory: ExperimentDirectory) -> dict[str, Any]:
    """Return an experiment's entry in the list of experiments."""
    config = directory.config()
    events = read_events(directory.events)
    state = state_of(directory)
    return {
        "id": directory.experiment_id,
        "name": config["name"],
        "state": _status_of(directory, state),
        "trials": len(state.trials),
        "best": shown(state.best(state.best_of(trial) for trial in state.trials.values())),
        "started": next((_moment(event["time"]) for event in events if "time" in event), None),
        "directory": str(directory.path),
    }


def details_of(directory: ExperimentDirectory) -> dict[str, Any]:
    """Return everything known about an experiment except the curves of its metrics."""
    state = state_of(directory)
    order = "smaller is better" if state.smaller_is_better else "larger is better"
    return {
        **summary_of(directory),
        "metric": f"{state.metric} ({order})",
        "messages": mask(state.messages),
        "trials": [_trial(state, trial) for trial in state.trials.values()],
    }


def failed_trials(directory: ExperimentDirectory) -> list[int]:
    """Return the ids of the trials that ended with an error."""
    trials = state_of(directory).trials.values()
    return [trial.trial_id for trial in trials if trial.status is TrialStatus.ERROR]


def best_checkpoint(state: ExperimentState, trial: TrialRecord) -> Checkpoint | None:
    """Return a trial's checkpoint with the best metric, or the newest one if none has a metric."""
    metrics = {checkpoint.checkpoint_id: state.metric_at(checkpoint) for checkpoint in trial.checkpoints.values()}
    best = state.best(metrics.values())
    if best is None:
        return trial.newest_checkpoint()
    return next(trial.checkpoints[checkpoint_id] for checkpoint_id, metric in metrics.items() if metric == best)


def shown(value: float | None) -> str | None:
    """Return a metric as text with six significant digits."""
    return None if value is None else f"{value:.6g}"


def _trial(state: ExperimentState, trial: TrialRecord) -> dict[str, Any]:
    latest = trial.validations[max(trial.validations)] if trial.validations else None
    checkpoint = best_checkpoint(state, trial)
    return {
        "id": trial.trial_id,
        "state": trial.status.value,
        "batches": trial.steps_completed,
        "best": shown(state.best_of(trial)),
        "latest": shown(state.metric_of(latest)),
        "restarts": trial.restarts,
        "checkpoint": None if checkpoint is None else checkpoint.checkpoint_id,
        "hparams": mask(trial.hparams),
        "reason": mask(trial.reason),
    }


def _status_of(directory: ExperimentDirectory, state: ExperimentState) -> str:
    if state.outcome is not None:
        return state.outcome
    return "RUNNING" if runner_of(directory.events) is not None else "PAUSED"


def _moment(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M")
