"""Pruning: deleting the checkpoints of a storage that the rule does not keep, outside of any run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import NamedTuple

from det_lightning import errors
from det_lightning.checkpoint.retention.policy import CheckpointRecord, Retention
from det_lightning.checkpoint.retention.run_claims import (
    delete_unless_used,
    is_trial_live,
    list_used,
    own_trial,
)
from det_lightning.checkpoint.retention.trial_checkpoints import make_record, with_metrics
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import explain_errors
from det_lightning.checkpoint.storage.metadata import CheckpointInfo, CheckpointNotes, read_notes
from det_lightning.checkpoint.storage.staging import find_writers
from det_lightning.checkpoint.storage.survey import require_current
from det_lightning.escaping import escape, get_logger

logger = get_logger(__name__)

# A program that leaves no mark may still be writing a younger one.
_INCOMPLETE_AFTER_S = 3600.0


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
        incomplete: incomplete checkpoints to delete.
        perhaps_being_written: incomplete checkpoints too young to delete.
        unknown: checkpoints whose metadata name no trial.
        in_use: checkpoints from which a live run resumed, or of a live run's trial.
        surveyed: the facts from which the rule chose.
    """

    by_rule: dict[Trial, list[CheckpointRecord]]
    kept: list[str]
    incomplete: list[str]
    perhaps_being_written: list[str]
    unknown: list[str]
    in_use: list[str]
    surveyed: list[CheckpointInfo] = dataclasses.field(default_factory=list)

    @property
    def to_delete(self) -> list[str]:
        """The ids of all checkpoints to delete."""
        return [record.id for records in self.by_rule.values() for record in records] + self.incomplete


def plan_pruning(storage: CheckpointStorage, retention: Retention, incomplete: bool = False) -> PrunePlan:
    """Choose the checkpoints to delete by the rule, for each experiment; delete nothing.

    With ``incomplete``, include incomplete checkpoints whose writer is known to be gone, or is unknown and has written
    nothing for an hour. Raise a ``ValueError`` if the trials of an experiment disagree on whether smaller metrics are
    better.
    """
    infos = {info.id: info for info in storage.survey()}
    by_rule: dict[Trial, list[CheckpointRecord]] = {}
    kept: set[str] = set()
    in_use: list[str] = []
    resumed = list_used(storage.root)
    for experiment, of_trial in _by_experiment(with_metrics(storage.root, infos.values())).items():
        superfluous = set(_choose(experiment, of_trial, retention))
        for trial, found in of_trial.items():
            kept.update({info.id for info in found} - superfluous)
            unwanted = [info.id for info in found if info.id in superfluous]
            # A live run relies on all checkpoints of its trial.
            is_live = bool(unwanted) and is_trial_live(storage.root, *trial)
            used = [name for name in unwanted if is_live or name in resumed]
            in_use += used
            if left := [name for name in unwanted if name not in used]:
                records = [make_record(info, trial.trial) for info in found if info.id in left]
                by_rule[trial] = sorted(records, key=lambda record: record.order)
    known = kept.union(in_use, (record.id for records in by_rule.values() for record in records))
    abandoned, perhaps_being_written = _find_incomplete(storage, {*infos}) if incomplete else ([], [])
    return PrunePlan(
        by_rule=by_rule,
        kept=sorted(kept),
        incomplete=[checkpoint_id for checkpoint_id in abandoned if checkpoint_id not in known],
        perhaps_being_written=perhaps_being_written,
        unknown=[checkpoint_id for checkpoint_id in infos if checkpoint_id not in known],
        in_use=in_use,
        surveyed=[info for info in infos.values() if info.id in known],
    )


def carry_out(plan: PrunePlan, storage: CheckpointStorage) -> list[str]:
    """Delete the planned checkpoints; return the ids.

    Raise a ``StorageError`` and delete nothing if the checkpoints in a bucket have changed.
    """
    if plan.by_rule:
        require_current(storage.root, plan.surveyed)
    deleted = []
    for trial, records in plan.by_rule.items():
        ids = [record.id for record in records]
        with own_trial(storage, *trial) as is_ours:
            if is_ours:
                deleted += [checkpoint_id for checkpoint_id in ids if _delete(storage, checkpoint_id)]
            else:
                logger.warning("Not deleted, as a run has begun to train trial %s: %s", trial.trial, ", ".join(ids))
    deleted += [checkpoint_id for checkpoint_id in plan.incomplete if _delete(storage, checkpoint_id)]
    if plan.incomplete:
        storage.remove_abandoned()
    return deleted


def _by_experiment(infos: Iterable[CheckpointInfo]) -> dict[str, dict[Trial, list[CheckpointInfo]]]:
    """Return the checkpoints of each trial of each experiment, without checkpoints whose metadata name no trial."""
    found: dict[str, dict[Trial, list[CheckpointInfo]]] = {}
    for info in infos:
        notes = read_notes(info.metadata)
        if notes.experiment is not None and notes.trial is not None:
            trial = Trial(notes.experiment, notes.trial)
            found.setdefault(notes.experiment, {}).setdefault(trial, []).append(info)
    return found


def _choose(experiment: str, of_trial: dict[Trial, list[CheckpointInfo]], retention: Retention) -> list[str]:
    measured: dict[str, CheckpointNotes] = {}  # by trial, what its newest checkpoint with a metric says
    for trial, found in of_trial.items():
        with_metric = [info for info in found if read_notes(info.metadata).metric is not None]
        if with_metric:
            newest = max(with_metric, key=lambda info: make_record(info, "").order)
            measured[trial.trial] = read_notes(newest.metadata)
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


def _find_incomplete(storage: CheckpointStorage, complete: set[str]) -> tuple[list[str], list[str]]:
    """Return the ids of incomplete checkpoints: first those with a dead writer, then the others."""
    with explain_errors("looking for incomplete checkpoints in", storage.root):
        writers = find_writers(storage.root)
    ids = [checkpoint_id for checkpoint_id in storage.list_ids(complete=False) if checkpoint_id not in complete]
    latest = time.time() - _INCOMPLETE_AFTER_S
    unmarked = storage.describe([checkpoint_id for checkpoint_id in ids if checkpoint_id not in writers])
    # Releases before 0.18 wrote no file that marks a checkpoint as complete.
    whole = {info.id for info in unmarked if info.complete or info.foreign}
    old = {info.id for info in unmarked if info.written is not None and info.written < latest} - whole
    over = old | {checkpoint_id for checkpoint_id, lives in writers.items() if not lives}
    return [one for one in ids if one in over], [one for one in ids if one not in over | whole]


def _delete(storage: CheckpointStorage, checkpoint_id: str) -> bool:
    """Remove a checkpoint, unless a run has begun to use it; return whether the checkpoint was removed."""
    try:
        return delete_unless_used(storage, checkpoint_id)
    except errors.CheckpointNotFound as e:  # another process was faster, or it is another program's
        logger.warning("Not deleted: %s", e)
        return False
