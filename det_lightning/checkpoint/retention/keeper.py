"""Keeping the checkpoints that are worth it, and deleting the others."""

from __future__ import annotations

import contextlib
import logging
import time

from det_lightning import errors
from det_lightning.checkpoint.retention.rule import CheckpointRecord, Retention
from det_lightning.checkpoint.retention.run_claims import delete_unless_used
from det_lightning.checkpoint.retention.trial_index import TrialIndex
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.metadata import notes_in

__all__ = ["CheckpointKeeper"]

logger = logging.getLogger("det_lightning.checkpoint")


class CheckpointKeeper:
    """Notes the checkpoints of one trial, and deletes those that its rule does not keep.

    Of other trials of the experiment it only reads the index: each deletes its own.

    Args:
        storage: where the checkpoints are.
        index: the trial's.
        retention: the rule.
        run_id: of the run; what other live runs go on from is not deleted.
    """

    def __init__(
        self, storage: CheckpointStorage, index: TrialIndex, retention: Retention, run_id: str | None = None
    ) -> None:
        self._storage = storage
        self._index = index
        self._retention = retention
        self._run_id = run_id

    def catch_up(self, resumed_from: str | None) -> None:
        """Do what an earlier run was killed before: note its latest checkpoint, finish deletions.

        Args:
            resumed_from: id of the checkpoint that the run goes on from, if any.

        Raises:
            StorageError: the storage can not be read.
        """
        # A run with nothing left to do writes nothing, after which the deletions would be tried again.
        for record in self._index.records:
            if not self._storage.is_complete(record.id):
                with contextlib.suppress(errors.CheckpointNotFound):
                    self._storage.delete(record.id)
                self._index.remove([record.id])
        if resumed_from is None or any(record.id == resumed_from for record in self._index.records):
            return
        if not self._storage.is_complete(resumed_from):
            return
        notes = notes_in(self._storage.read_metadata(resumed_from))
        if notes.trial == self._index.trial:
            self.note_written(resumed_from, notes.steps_completed or 0, notes.metric)

    def note_written(self, checkpoint_id: str, steps_completed: int, metric: float | None) -> list[str]:
        """Note a complete checkpoint, then delete what need not be kept any more; return the ids."""
        latest = max((record.order for record in self._index.records), default=0.0)
        self._index.add(
            CheckpointRecord(
                id=checkpoint_id,
                trial=self._index.trial,
                steps_completed=steps_completed,
                # Clocks may be set back; the order must not be.
                order=max(time.time(), latest + 1e-3),
                metric=metric,
            )
        )
        return self._delete_the_rest()

    def note_metric(self, steps_completed: int, metric: float) -> list[str]:
        """Note the metric of a validation that came after the checkpoint of the same batch; return what was deleted."""
        return self._delete_the_rest() if self._index.note_metric(steps_completed, metric) else []

    def _delete_the_rest(self) -> list[str]:
        own = {record.id for record in self._index.records}
        records = self._index.experiment_records()
        deleted = []
        for checkpoint_id in self._retention.choose_to_delete(records, self._index.smaller_is_better):
            if checkpoint_id not in own:
                continue
            try:
                if not delete_unless_used(self._storage, checkpoint_id, self._run_id):
                    logger.info("Checkpoint %s stays for now: another run goes on from it.", checkpoint_id)
                    continue
            except errors.CheckpointNotFound:
                logger.warning("Checkpoint %s was deleted by someone else.", checkpoint_id)
            except errors.StorageError as e:
                # The new checkpoint is safe, and training must not end because an old one is still there.
                logger.warning("An old checkpoint stays, and is tried again after the next one: %s", e)
                continue
            deleted.append(checkpoint_id)
        if deleted:
            self._index.remove(deleted)
        return deleted
