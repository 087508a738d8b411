"""Deleting the checkpoints that the rule does not keep, during a run or afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from det_lightning import errors
from det_lightning.checkpoint.retention.rule import CheckpointRecord, Retention
from det_lightning.checkpoint.retention.run_claims import delete_unless_used, find_used, is_trial_live, is_trial_name
from det_lightning.checkpoint.retention.trial_index import TrialIndex, read_indexes, record_from_metadata
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import explain_errors
from det_lightning.checkpoint.storage.metadata import CheckpointInfo, notes_in
from det_lightning.checkpoint.storage.staging import find_writers
from det_lightning.checkpoint.storage.survey import require_current
from det_lightning.escaping import escape

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@dataclasses.dataclass(eq=False)
class RunRetention:
    """Records the checkpoints of one trial, and deletes those that its rule does not keep.

    Each trial of an experiment deletes its own, except those that live runs other than ``run_id`` have resumed from.
    """

    storage: CheckpointStorage
    index: TrialIndex
    retention: Retention
    run_id: str | None = None

    def catch_up(self, resumed_from: str | None) -> None:
        """Finish the work of an earlier run that was killed: record the checkpoint ``resumed_from``, and delete."""
        # Deletions are otherwise retried after the next checkpoint, and a run with nothing left to do writes none.
        for record in self.index.records:
            if not self.storage.is_complete(record.id):
                with contextlib.suppress(errors.CheckpointNotFound):
                    self.storage.delete(record.id)
                self._in_index("forgetting", functools.partial(self.index.remove, [record.id]))
        is_known = any(record.id == resumed_from for record in self.index.records)
        if resumed_from is None or is_known or not self.storage.is_complete(resumed_from):
            return
        notes = notes_in(self.storage.read_metadata(resumed_from))
        if notes.trial == self.index.trial:
            self.note_written(resumed_from, notes.steps_completed or 0, notes.metric)

    def note_written(self, checkpoint_id: str, steps_completed: int, metric: float | None) -> list[str]:
        """Record a complete checkpoint, then delete those that need not be kept any longer; return their ids."""
        latest = max((record.order for record in self.index.records), default=0.0)
        record = CheckpointRecord(
            id=checkpoint_id,
            trial=self.index.trial,
            steps_completed=steps_completed,
            # The order must grow even if the clock is set back.
            order=max(time.time(), latest + 1e-3),
            metric=metric,
        )
        self._in_index("noting", lambda: self.index.add(record))
        return self._delete_the_rest()

    def note_metric(self, steps_completed: int, metric: float) -> list[str]:
        """Record the metric of a validation for the checkpoint at the same batch; return the ids of deleted ones."""
        is_noted = self._in_index("noting", lambda: self.index.note_metric(steps_completed, metric))
        return self._delete_the_rest() if is_noted else []

    def _delete_the_rest(self) -> list[str]:
        own = {record.id for record in self.index.records}
        records = self._in_index("reading", self.index.experiment_records)
        deleted = []
        for checkpoint_id in self.retention.choose_to_delete(records, self.index.smaller_is_better):
            if checkpoint_id not in own:
                continue
            try:
                if not delete_unless_used(self.storage, checkpoint_id, self.run_id):
                    logger.info("Checkpoint %s stays for now: another run resumes from it.", escape(checkpoint_id))
                    continue
            except errors.CheckpointNotFound:
                logger.warning("Checkpoint %s was deleted by someone else.", escape(checkpoint_id))
            except errors.StorageError as e:
                # The new checkpoint is safe, and training must not fail because an old one could not be deleted.
                logger.warning("An old checkpoint could not be deleted; this is tried again after the next one: %s", e)
                continue
            deleted.append(checkpoint_id)
        if deleted:
            self._in_index("forgetting", lambda: self.index.remove(deleted))
        return deleted

    def _in_index(self, what: str, action: Callable[[], _Result]) -> _Result:
        """Return the result of an action on the index, which is tried again if the storage fails."""
        return self.storage.retry.call(f"{what} checkpoints in the index of", action, where=self.storage)


# A program that leaves no mark may still be writing a younger one.
_INCOMPLETE_AFTER_S = 3600.0


@dataclasses.dataclass
class PrunePlan:
    """Ids of checkpoints: which to delete, and why the others stay.

    Attributes:
        by_rule: those of each trial that the rule does not keep.
        kept: those that the rule keeps.
        incomplete: incomplete ones to delete.
        perhaps_being_written: incomplete ones that are too young to delete.
        unknown: those whose trial neither an index nor their metadata names.
        in_use: those that a live run has resumed from, or that belong to a live run's trial.
        surveyed: what was known about those that the rule chose from.
    """

    by_rule: list[tuple[TrialIndex, list[str]]]
    kept: list[str]
    incomplete: list[str]
    perhaps_being_written: list[str]
    unknown: list[str]
    in_use: list[str]
    surveyed: list[CheckpointInfo] = dataclasses.field(default_factory=list)

    @property
    def to_delete(self) -> list[str]:
        """The ids of all checkpoints to delete."""
        return [checkpoint_id for _, ids in self.by_rule for checkpoint_id in ids] + self.incomplete


def plan_pruning(storage: CheckpointStorage, retention: Retention, incomplete: bool = False) -> PrunePlan:
    """Decide what to delete by the rule, which is applied to each experiment; delete nothing.

    With ``incomplete``, include incomplete checkpoints whose writer is known to be gone, or is unknown and has written
    nothing for an hour. Raise a ``ValueError`` if the trials of an experiment do not agree on whether smaller metrics
    are better.
    """
    infos = {info.id: info for info in storage.survey()}
    there = set(infos)
    by_experiment: dict[str, list[TrialIndex]] = {}
    for index in _indexes_of(storage, infos.values()):
        by_experiment.setdefault(index.experiment, []).append(index)
    by_rule: list[tuple[TrialIndex, list[str]]] = []
    kept: set[str] = set()
    in_use: list[str] = []
    resumed = find_used(storage.root)
    for experiment, indexes in by_experiment.items():
        # An index may name directories that are gone or never were checkpoints; they neither count nor are deleted.
        records = {index.trial: [r for r in index.records if r.id in there] for index in indexes}
        superfluous = set(_choose(experiment, indexes, [r for those in records.values() for r in those], retention))
        for index in indexes:
            ids = [record.id for record in records[index.trial]]
            kept.update(set(ids) - superfluous)
            unwanted = [name for name in ids if name in superfluous]
            # A live run relies on all checkpoints of its trial.
            is_live = bool(unwanted) and is_trial_live(storage.root, index.experiment, index.trial)
            used = [name for name in unwanted if is_live or name in resumed]
            in_use += used
            if left := [name for name in unwanted if name not in used]:
                by_rule.append((index, left))
    known = kept.union(in_use, *(ids for _, ids in by_rule))
    abandoned, perhaps_being_written = _find_incomplete(storage, there) if incomplete else ([], [])
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
    """Delete the checkpoints that ``plan`` names, and remove them from the indexes; return the ids.

    Raise a ``StorageError`` and delete nothing if the checkpoints in a bucket have changed.
    """
    if plan.by_rule:
        require_current(storage.root, plan.surveyed)
    deleted = []
    for index, ids in plan.by_rule:
        gone: list[str] = []
        try:
            gone.extend(checkpoint_id for checkpoint_id in ids if _delete(storage, checkpoint_id))
        finally:
            if gone:
                index.remove(gone)
        deleted += gone
    deleted += [checkpoint_id for checkpoint_id in plan.incomplete if _delete(storage, checkpoint_id)]
    if plan.incomplete:
        storage.remove_abandoned()
    return deleted


def _indexes_of(storage: CheckpointStorage, complete: Iterable[CheckpointInfo]) -> list[TrialIndex]:
    """Return the indexes of all trials, including checkpoints written without retention that name their trial."""
    indexes = {(index.experiment, index.trial): index for index in read_indexes(storage.root)}
    indexed = {record.id for index in indexes.values() for record in index.records}
    for info in complete:
        notes = notes_in({} if info.id in indexed else info.metadata)
        experiment = notes.experiment
        trial = notes.trial
        if experiment is None or trial is None or not (is_trial_name(experiment) and is_trial_name(trial)):
            continue
        index = indexes.get((experiment, trial))
        if index is None:
            index = TrialIndex(storage.root, experiment, trial, notes.metric_name, notes.smaller_is_better)
            indexes[experiment, trial] = index
        index.include(record_from_metadata(info.id, trial, info.metadata, info.metadata_written))
    return list(indexes.values())


def _choose(
    experiment: str, indexes: list[TrialIndex], records: list[CheckpointRecord], retention: Retention
) -> list[str]:
    directions = {index.smaller_is_better for index in indexes}
    if len(directions) > 1:
        described = ", ".join(
            f"{escape(index.trial)}: smaller_is_better={index.smaller_is_better}" for index in indexes
        )
        raise ValueError(
            f"The trials of experiment {experiment!r} do not agree on which metric is the better one ({described}). "
            "Correct their indexes, or delete by hand."
        )
    return retention.choose_to_delete(records, directions.pop())


def _find_incomplete(storage: CheckpointStorage, complete: set[str]) -> tuple[list[str], list[str]]:
    """Return the ids of incomplete checkpoints: those whose writer is or must be gone, and the others."""
    with explain_errors("looking for incomplete checkpoints in", storage):
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
    """Remove a checkpoint, unless a run has begun to use it; return whether it was removed."""
    try:
        return delete_unless_used(storage, checkpoint_id)
    except errors.CheckpointNotFound as e:  # another process was faster, or it is another program's
        logger.warning("Not deleted: %s", e)
        return False
