"""Experiments of which only checkpoints are left, described from the checkpoints' metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from det_lightning.checkpoint.format.layout import LOAD_DATA_FILE, MASTER_KEY, leads_out
from det_lightning.checkpoint.storage.checkpoint_info import CheckpointInfo
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import Location
from det_lightning.escaping import get_logger
from det_lightning.experiments.overview import find_best_trial
from det_lightning.files.strict_json import as_number, is_shallow

logger = get_logger(__name__)


def _read_master(info: CheckpointInfo, what: str) -> Mapping[str, Any]:
    """Return the ``experiment``, ``trial`` or ``validation_metrics`` of Determined's master; empty if not noted."""
    master = info.metadata.get(MASTER_KEY)
    known = master.get(what) if isinstance(master, dict) else None
    return known if isinstance(known, dict) else {}


def _get_age(info: CheckpointInfo) -> tuple[int, float]:
    return info.notes.steps_completed or 0, info.time or 0.0


def _name_metric(info: CheckpointInfo) -> str:
    return info.notes.metric_name or "metric"


def read_stored_experiments(url: str, options: Mapping[str, Any], *, with_curves: bool = False) -> list[dict[str, Any]]:
    """Return the experiments named by the checkpoints of a storage, in the form of ``experiment show``.

    Only trials with a checkpoint in the storage are included.
    """
    storage = CheckpointStorage(url, options=options)
    by_experiment: dict[str, list[CheckpointInfo]] = {}
    for info in storage.list_checkpoints():
        if info.notes.experiment is not None and info.notes.trial is not None:
            by_experiment.setdefault(info.notes.experiment, []).append(info)
    names = sorted(by_experiment, key=_number_first)
    return [_experiment(storage, name, by_experiment[name], with_curves=with_curves) for name in names]


def _experiment(
    storage: CheckpointStorage, experiment: str, noted: list[CheckpointInfo], *, with_curves: bool
) -> dict[str, Any]:
    by_trial: dict[str, list[CheckpointInfo]] = {}
    for one in noted:
        by_trial.setdefault(one.notes.trial or "", []).append(one)
    known = _read_master(noted[0], "experiment")
    best = _best(noted)
    metric = None
    if best is not None:
        metric = f"{_name_metric(best)} ({'smaller' if best.notes.smaller_is_better else 'larger'} is better)"
    trials = [_trial(storage, trial, by_trial[trial]) for trial in sorted(by_trial, key=_number_first)]
    for trial in trials if with_curves else ():
        trial["curves"] = _make_curves(by_trial[trial["id"]])
    return {
        "id": experiment,
        "name": known.get("name"),
        "state": _state(known),
        "best": None if best is None else best.notes.metric,
        "started": known.get("start_time"),
        "directory": str(storage),
        "best_trial": find_best_trial(None if best is None else best.notes.metric, trials),
        "metric": metric,
        "messages": [],
        "trials": trials,
    }


def _trial(storage: CheckpointStorage, trial: str, noted: list[CheckpointInfo]) -> dict[str, Any]:
    newest = max(noted, key=_get_age)
    best = _best(noted)
    validated = [one for one in noted if one.notes.metric is not None]
    hparams = newest.metadata.get("hparams") or _read_hparams(storage.root / newest.id)
    latest = max(validated, key=_get_age, default=None)
    return {
        "id": trial,
        "state": _state(_read_master(newest, "trial")),
        "batches": newest.notes.steps_completed,
        "best": None if best is None else best.notes.metric,
        "best_batches": None if best is None else best.notes.steps_completed,
        "latest": None if latest is None else latest.notes.metric,
        "metrics": _metrics(best),
        "restarts": None,
        "checkpoint": (best or newest).id,
        "checkpoint_batches": (best or newest).notes.steps_completed,
        "checkpoint_path": str(storage.root / (best or newest).id),
        "checkpoint_exists": True,
        "hparams": hparams if isinstance(hparams, dict) else None,
        "reason": None,
    }


def _read_hparams(checkpoint: Location) -> Any:
    """Return the hyperparameters in ``load_data.json``, from the Trainer API; None if missing or unreadable."""
    if checkpoint.is_local and leads_out(checkpoint.local_path, checkpoint.local_path / LOAD_DATA_FILE):
        return None
    try:
        content = json.loads((checkpoint / LOAD_DATA_FILE).read())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as e:
        logger.warning("The hyperparameters of %s cannot be read: %s", checkpoint, e)
        return None
    return content.get("hparams") if isinstance(content, dict) and is_shallow(content) else None


def _make_curves(noted: list[CheckpointInfo]) -> dict[str, list[tuple[float, float]]]:
    """Return the batches and values of each metric in the checkpoints of a trial."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for one in sorted((one for one in noted if one.notes.metric is not None), key=_get_age):
        for name, value in _metrics(one).items():
            if (number := as_number(value)) is not None:
                curves.setdefault(name, []).append((one.notes.steps_completed or 0, number))
    return curves


def _metrics(best: CheckpointInfo | None) -> dict[str, Any]:
    if best is None:
        return {}
    return {**_read_master(best, "validation_metrics"), _name_metric(best): best.notes.metric}


def _best(noted: list[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the checkpoint with the best metric, or None. The newest checkpoint says whether smaller is better."""
    # NaN is not equal to NaN.
    validated = [one for one in noted if one.notes.metric is not None and one.notes.metric == one.notes.metric]
    if not validated:
        return None
    choose = min if max(validated, key=_get_age).notes.smaller_is_better else max
    return choose(validated, key=lambda one: one.notes.metric or 0.0)


def _state(known: Mapping[str, Any]) -> str | None:
    state = known.get("state")
    return state.removeprefix("STATE_") if isinstance(state, str) else None


def _number_first(name: str) -> tuple[bool, int, str]:
    is_number = name.isascii() and name.isdigit() and len(name) < 20
    return not is_number, int(name) if is_number else 0, name
