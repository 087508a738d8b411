"""The description of an experiment for ``experiment ls``, ``show`` and ``compare``, from files alone.

Change here: a field of a trial in ``experiment show --json`` is an entry of ``_describe_trial``; its column is in
``det_lightning/experiments/trial_table.py``. ``TrialRecord`` in ``det_lightning/experiments/state.py`` has the facts.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from det_lightning import errors
from det_lightning.escaping import get_logger
from det_lightning.experiments.checkpoint_lookup import CheckpointLookup
from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.event_log import find_runner, read_events
from det_lightning.experiments.state import Checkpoint, ExperimentState, TrialRecord, TrialStatus
from det_lightning.experiments.trial_process import describe_hook, is_running, read_run_status
from det_lightning.experiments.trial_reports import read_curves, take_unread_reports
from det_lightning.masking import find_secrets, mask_text

logger = get_logger(__name__)


class _Place(NamedTuple):
    """The path or URL of a checkpoint and whether it exists; None if the storage cannot be read."""

    path: str | None = None
    exists: bool | None = None


def read_state(directory: ExperimentDirectory) -> ExperimentState:
    """Return the state of an experiment, even while the experiment runs.

    The state includes reports of trials that the runner has not read yet.
    """
    searcher = directory.config["searcher"]
    state = ExperimentState(searcher["metric"] or "", searcher["smaller_is_better"], read_events(directory.events))
    is_run = find_runner(directory.events) is not None
    for trial in [trial for trial in state.trials.values() if trial.is_open]:
        take_unread_reports(state, trial, directory.trial(trial.trial_id) / "metrics.jsonl")
        if not is_run:
            trial.status = _find_orphan_status(directory, trial)
    if not is_run:
        state.pause_queued()
    return state


def _find_orphan_status(directory: ExperimentDirectory, trial: TrialRecord) -> TrialStatus:
    """Return the status of a trial whose runner was killed; the supervisor has asked the trial to save and end."""
    folder = directory.trial(trial.trial_id)
    if is_running(folder, trial.runs):
        return TrialStatus.STOPPING
    is_done = read_run_status(folder, trial.runs) == 0 and not trial.preempted and describe_hook(folder) is None
    return TrialStatus.COMPLETED if is_done else TrialStatus.PAUSED


def summarize_experiment(directory: ExperimentDirectory) -> dict[str, Any]:
    """Return an experiment's entry in the list of experiments."""
    return _summarize(directory, read_state(directory))


def _summarize(directory: ExperimentDirectory, state: ExperimentState) -> dict[str, Any]:
    is_run = find_runner(directory.events) is not None
    started = None if state.started_at is None else datetime.datetime.fromtimestamp(state.started_at).astimezone()
    return {
        "id": directory.experiment_id,
        "name": directory.config["name"],
        "state": state.outcome or ("RUNNING" if is_run else "PAUSED"),
        "trials": len(state.trials),
        "best": state.best(state.find_best(trial) for trial in state.trials.values()),
        "started": started and started.strftime("%Y-%m-%d %H:%M"),
        "directory": str(directory.path),
    }


def describe_experiment(directory: ExperimentDirectory, *, with_curves: bool = False) -> dict[str, Any]:
    """Return everything known about an experiment, the best trial first; ``with_curves`` adds each metric by batch."""
    state = read_state(directory)
    summary = _summarize(directory, state)
    config = directory.config
    secrets = [*find_secrets(config)]
    chosen = {trial.trial_id: _find_best_checkpoint(state, trial) for trial in state.trials.values()}
    places = _locate(directory, [checkpoint for checkpoint in chosen.values() if checkpoint is not None])
    trials = [_describe_trial(state, trial, chosen[trial.trial_id], places, secrets) for trial in state.trials.values()]
    if with_curves:
        for shown, trial in zip(trials, state.trials.values(), strict=True):
            shown["curves"] = read_curves(trial, directory.trial(trial.trial_id) / "metrics.jsonl")
    ranked = [trial for trial in trials if trial["best"] is not None]
    ranked.sort(key=lambda trial: trial["best"], reverse=not state.smaller_is_better)
    return {
        **summary,
        "best_trial": ranked[0]["id"] if ranked else None,
        "metric": f"{state.metric} ({'smaller' if state.smaller_is_better else 'larger'} is better)",
        "messages": [mask_text(message, secrets) for message in state.messages],
        "missing_metric": state.explain_missing_metric(),
        "logarithmic": [*_find_logarithmic(config["hyperparameters"] or {})],
        "trials": ranked + [trial for trial in trials if trial["best"] is None],
    }


def _find_logarithmic(entries: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of each hyperparameter that is drawn on a logarithmic scale."""
    for name, entry in entries.items():
        if isinstance(entry, Mapping) and entry.get("type") == "log":
            yield f"{prefix}{name}"
        elif isinstance(entry, Mapping) and "type" not in entry:
            yield from _find_logarithmic(entry, f"{prefix}{name}.")


def _find_best_checkpoint(state: ExperimentState, trial: TrialRecord) -> Checkpoint | None:
    """Return a trial's checkpoint with the best metric; without metrics, the newest one."""
    metrics = [(checkpoint, state.metric_at(checkpoint)) for checkpoint in trial.checkpoints.values()]
    best = state.best(metric for _, metric in metrics)
    return next((one for one, metric in metrics if best is not None and metric == best), trial.newest_checkpoint())


def _find_best_batches(state: ExperimentState, trial: TrialRecord, checkpoint: Checkpoint | None) -> int | None:
    """Return the number of batches at a trial's best validation; among equally good ones, at that of the checkpoint."""
    value = state.find_best(trial)
    best = [batches for batches, metrics in trial.validations.items() if state.find_metric(metrics) == value]
    if value is None or not best:
        return None
    return checkpoint.steps_completed if checkpoint and checkpoint.steps_completed in best else best[0]


def _locate(directory: ExperimentDirectory, checkpoints: list[Checkpoint]) -> dict[str, _Place]:
    """Return the places of checkpoints by id."""
    lookup = CheckpointLookup(directory.checkpoint_storage())
    root = existing = None
    try:
        root = str(lookup.open()).rstrip("/")
        existing = lookup.find_existing(checkpoints)
    except (errors.StorageError, ValueError) as e:
        logger.warning("It is unknown which checkpoints exist: %s", e)
    places = {}
    for checkpoint in checkpoints:
        checkpoint_id = checkpoint.checkpoint_id
        where = checkpoint.storage or root
        path = None if where is None else f"{where}/{checkpoint_id}"
        places[checkpoint_id] = _Place(path, None if existing is None else checkpoint_id in existing)
    return places


def _describe_trial(
    state: ExperimentState,
    trial: TrialRecord,
    checkpoint: Checkpoint | None,
    places: dict[str, _Place],
    secrets: list[str],
) -> dict[str, Any]:
    latest = trial.latest_metrics()
    place = _Place() if checkpoint is None else places[checkpoint.checkpoint_id]
    batches = _find_best_batches(state, trial, checkpoint)
    best = None if batches is None else trial.validations[batches]
    return {
        "id": trial.trial_id,
        "state": trial.status.value,
        "batches": trial.steps_completed,
        "best": state.find_metric(best),
        "best_batches": batches,
        "latest": state.find_metric(latest),
        "metrics": best or latest or {},
        "restarts": trial.restarts,
        "nodes": trial.nodes,
        "seed": trial.trial_seed,
        "checkpoint": None if checkpoint is None else checkpoint.checkpoint_id,
        "checkpoint_batches": None if checkpoint is None else checkpoint.steps_completed,
        "checkpoint_path": place.path,
        "checkpoint_exists": place.exists,
        "hparams": trial.hparams,
        "reason": trial.reason and mask_text(trial.reason, secrets),
    }
