"""Deletes, outside of any run, the checkpoints of a storage that the rule does not keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from det_lightning import errors
from det_lightning.checkpoint.retention.policy import CheckpointRecord, Retention
from det_lightning.checkpoint.retention.trial_checkpoints import (
    TrialLock,
    is_trial_live,
    make_record,
    remove_dead_locks,
)
from det_lightning.checkpoint.storage.checkpoint_info import CheckpointInfo, CheckpointNotes
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import explain_errors
from det_lightning.checkpoint.storage.staging import remove_old_bookkeeping
from det_lightning.escaping import escape, get_logger

logger = get_logger(__name__)


class Trial(NamedTuple):
    """The names of a trial and its experiment."""

    experiment: str
    trial: str


@dataclasses.dataclass
class PrunePlan:
    """The checkpoints of a storage by id: those to delete, and those to keep, by reason.

    Attributes:
        by_rule: checkpoints of each trial to delete by the rule.
        kept: checkpoints that the rule keeps.
        unknown: checkpoints whose metadata name no trial.
        in_use: checkpoints of the trials of live runs.
    """

    by_rule: dict[Trial, list[CheckpointRecord]]
    kept: list[str]
    unknown: list[str]
    in_use: list[str]

    @property
    def to_delete(self) -> list[str]:
        """The ids of all checkpoints to delete."""
        return [record.id for records in self.by_rule.values() for record in records]


def plan_pruning(storage: CheckpointStorage, retention: Retention) -> PrunePlan:
    """Choose the checkpoints to delete by the rule, for each experiment; delete nothing.

    Raise a ``ValueError`` if the trials of an experiment disagree on whether smaller metrics are better.
    """
    infos = {info.id: info for info in storage.list_checkpoints()}
    by_rule: dict[Trial, list[CheckpointRecord]] = {}
    kept: set[str] = set()
    in_use: list[str] = []
    for experiment, of_trial in _by_experiment(infos.values()).items():
        superfluous = set(_choose(experiment, of_trial, retention))
        for trial, found in of_trial.items():
            kept.update({info.id for info in found} - superfluous)
            unwanted = [make_record(info, trial.trial) for info in found if info.id in superfluous]
            # A live run relies on all checkpoints of its trial.
            if unwanted and is_trial_live(storage.root, *trial):
                in_use += [record.id for record in unwanted]
            elif unwanted:
                by_rule[trial] = sorted(unwanted, key=lambda record: record.order)
    known = kept.union(in_use, (record.id for records in by_rule.values() for record in records))
    return PrunePlan(
        by_rule=by_rule,
        kept=sorted(kept),
        unknown=[checkpoint_id for checkpoint_id in infos if checkpoint_id not in known],
        in_use=in_use,
    )


def carry_out(plan: PrunePlan, storage: CheckpointStorage) -> list[str]:
    """Delete the planned checkpoints, and what killed runs and earlier releases have left; return the ids."""
    deleted = []
    for trial, records in plan.by_rule.items():
        ids = [record.id for record in records]
        with explain_errors("locking a trial in", storage.root):
            lock = TrialLock.take(storage.root, *trial)
        if lock is None:
            logger.warning("Not deleted, as a run has begun to train trial %s: %s", trial.trial, ", ".join(ids))
            continue
        try:
            deleted += [checkpoint_id for checkpoint_id in ids if _delete(storage, checkpoint_id)]
        finally:
            lock.release()
    with explain_errors("cleaning", storage.root):
        remove_old_bookkeeping(storage.root)
        remove_dead_locks(storage.root)
    return deleted + storage.remove_leftovers()


def _by_experiment(infos: Iterable[CheckpointInfo]) -> dict[str, dict[Trial, list[CheckpointInfo]]]:
    """Return the checkpoints of each trial of each experiment, without checkpoints whose metadata name no trial."""
    found: dict[str, dict[Trial, list[CheckpointInfo]]] = {}
    for info in infos:
        if info.notes.experiment is not None and info.notes.trial is not None:
            trial = Trial(info.notes.experiment, info.notes.trial)
            found.setdefault(trial.experiment, {}).setdefault(trial, []).append(info)
    return found


def _choose(experiment: str, of_trial: dict[Trial, list[CheckpointInfo]], retention: Retention) -> list[str]:
    measured: dict[str, CheckpointNotes] = {}  # by trial, what its newest checkpoint with a metric says
    for trial, found in of_trial.items():
        with_metric = [info for info in found if info.notes.metric is not None]
        if with_metric:
            measured[trial.trial] = max(with_metric, key=lambda info: info.time or 0.0).notes
    directions = {notes.smaller_is_better for notes in measured.values()}
    names = {notes.metric_name for notes in measured.values() if notes.metric_name is not None}
    if len(directions) > 1 or len(names) > 1:
        described = "; ".join(
            f"{escape(trial)}: {notes.metric_name!r:.80}, smaller_is_better={notes.smaller_is_better}"
            for trial, notes in measured.items()
        )
        raise ValueError(
            f"The trials of experiment {experiment!r} compare their checkpoints by different metrics ({described}). "
            "Delete checkpoints by hand."
        )
    name = names.pop() if names else None
    records = [make_record(info, trial.trial, name) for trial, found in of_trial.items() for info in found]
    return retention.choose_to_delete(records, directions.pop() if directions else True)


def _delete(storage: CheckpointStorage, checkpoint_id: str) -> bool:
    """Remove a checkpoint; return whether the checkpoint was removed."""
    try:
        storage.delete(checkpoint_id)
    except errors.CheckpointNotFound as e:  # another process was faster, or it is another program's
        logger.warning("Not deleted: %s", e)
        return False
    return True
