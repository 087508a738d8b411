"""Keeping the checkpoints that are worth it, and deleting the others."""

from __future__ import annotations

import logging
import time

from det_lightning import errors
from det_lightning.checkpoint.index import TrialIndex
from det_lightning.checkpoint.retention import CheckpointRecord, Retention
from det_lightning.checkpoint.storage import CheckpointStorage

__all__ = ["CheckpointKeeper"]

logger = logging.getLogger("det_lightning.checkpoint")


class CheckpointKeeper:
    """Notes the checkpoints of one trial, and deletes those that its rule does not keep.

    Of other trials of the experiment it only reads the index: each deletes its own.

    Args:
        storage: where the checkpoints are.
        index: the trial's.
        retention: the rule.
    """

    def __init__(self, storage: CheckpointStorage, index: TrialIndex, retention: Retention) -> None:
        self._storage = storage
        self._index = index
        self._retention = retention

    def note_written(self, checkpoint_id: str, steps_completed: int, metric: float | None) -> None:
        """Note a complete checkpoint, then delete what need not be kept any more."""
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
        self._delete_the_rest()

    def note_metric(self, steps_completed: int, metric: float) -> None:
        """Note the metric of a validation that came after the checkpoint of the same batch."""
        if self._index.note_metric(steps_completed, metric):
            self._delete_the_rest()

    def _delete_the_rest(self) -> None:
        own = {record.id for record in self._index.records}
        records = self._index.experiment_records()
        deleted = []
        for checkpoint_id in self._retention.choose_to_delete(records, self._index.smaller_is_better):
            if checkpoint_id not in own:
                continue
            try:
                self._storage.delete(checkpoint_id)
            except errors.CheckpointNotFound:
                logger.warning("Checkpoint %s was deleted by someone else.", checkpoint_id)
            except errors.StorageError as e:
                # The new checkpoint is safe, and training must not end because an old one is still there.
                logger.warning("An old checkpoint stays, and is tried again after the next one: %s", e)
                continue
            deleted.append(checkpoint_id)
        if deleted:
            self._index.remove(deleted)
