"""Experiments and runs of which only checkpoints are left, described by the checkpoints' metadata."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from det_lightning.checkpoint.format.layout import LOAD_DATA_FILE, MASTER_KEY, leads_out
from det_lightning.checkpoint.storage.checkpoint_info import CheckpointInfo, CheckpointNotes
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import Location
from det_lightning.escaping import get_logger
from det_lightning.experiments.overview import find_best_trial
from det_lightning.files.strict_json import as_number, is_shallow

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class _Noted:
    """A complete checkpoint with the names of trial and experiment."""

    info: CheckpointInfo

    @property
    def notes(self) -> CheckpointNotes:
        return self.info.notes

    @property
    def age(self) -> tuple[int, float]:
        return self.notes.steps_completed or 0, self.info.time or 0.0

    @property
    def metric_name(self) -> str:
        return self.notes.metric_name or "metric"

    def from_master(self, what: str) -> Mapping[str, Any]:
        """Return the ``experiment``, ``trial`` or ``validation_metrics`` of Determined's master; empty if not noted."""
        master = self.info.metadata.get(MASTER_KEY)
        known = master.get(what) if isinstance(master, dict) else None
        return known if isinstance(known, dict) else {}


def read_stored_experiments(url: str, options: Mapping[str, Any], *, with_curves: bool = False) -> list[dict[str, Any]]:
    """Return the experiments that the checkpoints in a storage name, in the form of ``experiment show``.

    Only trials with a checkpoint in the storage are included.
    """
    storage = CheckpointStorage(url, options=options)
    by_experiment: dict[str, list[_Noted]] = {}
    for info in storage.list_checkpoints():
        if info.notes.experiment is not None and info.notes.trial is not None:
            by_experiment.setdefault(info.notes.experiment, []).append(_Noted(info))
    names = sorted(by_experiment, key=_number_first)
    return [_experiment(storage, name, by_experiment[name], with_curves=with_curves) for name in names]


def _experiment(
    storage: CheckpointStorage, experiment: str, noted: list[_Noted], *, with_curves: bool
) -> dict[str, Any]:
    by_trial: dict[str, list[_Noted]] = {}
    for one in noted:
        by_trial.setdefault(one.notes.trial or "", []).append(one)
    known = noted[0].from_master("experiment")
    best = _best(noted)
    metric = None
    if best is not None:
        metric = f"{best.metric_name} ({'smaller' if best.notes.smaller_is_better else 'larger'} is better)"
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


def _trial(storage: CheckpointStorage, trial: str, noted: list[_Noted]) -> dict[str, Any]:
    newest = max(noted, key=lambda one: one.age)
    best = _best(noted)
    validated = [one for one in noted if one.notes.metric is not None]
    hparams = newest.info.metadata.get("hparams") or _read_hparams(storage.root / newest.info.id)
    latest = max(validated, key=lambda one: one.age, default=None)
    return {
        "id": trial,
        "state": _state(newest.from_master("trial")),
        "batches": newest.notes.steps_completed,
        "best": None if best is None else best.notes.metric,
        "best_batches": None if best is None else best.notes.steps_completed,
        "latest": None if latest is None else latest.notes.metric,
        "metrics": _metrics(best),
        "restarts": None,
        "checkpoint": (best or newest).info.id,
        "checkpoint_batches": (best or newest).notes.steps_completed,
        "checkpoint_path": str(storage.root / (best or newest).info.id),
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


def _make_curves(noted: list[_Noted]) -> dict[str, list[tuple[float, float]]]:
    """Return the batches and values of each metric in the checkpoints of a trial."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for one in sorted((one for one in noted if one.notes.metric is not None), key=lambda one: one.age):
        for name, value in _metrics(one).items():
            if (number := as_number(value)) is not None:
                curves.setdefault(name, []).append((one.notes.steps_completed or 0, number))
    return curves


def _metrics(best: _Noted | None) -> dict[str, Any]:
    if best is None:
        return {}
    return {**best.from_master("validation_metrics"), best.metric_name: best.notes.metric}


def _best(noted: list[_Noted]) -> _Noted | None:
    """Return the checkpoint with the best metric, or None; the newest checkpoint says which direction is better."""
    # NaN is not equal to NaN.
    validated = [one for one in noted if one.notes.metric is not None and one.notes.metric == one.notes.metric]
    if not validated:
        return None
    choose = min if max(validated, key=lambda one: one.age).notes.smaller_is_better else max
    return choose(validated, key=lambda one: one.notes.metric or 0.0)


def _state(known: Mapping[str, Any]) -> str | None:
    state = known.get("state")
    return state.removeprefix("STATE_") if isinstance(state, str) else None


def _number_first(name: str) -> tuple[bool, int, str]:
    is_number = name.isascii() and name.isdigit() and len(name) < 20
    return not is_number, int(name) if is_number else 0, name
