"""The checkpoints of a trial, read from the storage once; deletes those that the rule does not keep."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import METADATA_FILE, with_entries
from det_lightning.checkpoint.retention.policy import CheckpointPolicy, CheckpointRecord
from det_lightning.checkpoint.storage.checkpoint_info import CheckpointInfo
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import explain_errors
from det_lightning.escaping import get_logger
from det_lightning.files.strict_json import to_json

logger = get_logger(__name__)


def make_record(info: CheckpointInfo, trial: str, metric_name: str | None = None) -> CheckpointRecord:
    """Return a checkpoint's record for the rule; with ``metric_name``, other metrics do not count."""
    notes = info.notes
    counts = metric_name is None or notes.metric_name in (None, metric_name)
    return CheckpointRecord(
        id=info.id,
        trial=trial,
        steps_completed=notes.steps_completed or 0,
        order=info.time or 0.0,
        metric=notes.metric if counts else None,
    )


class TrialCheckpoints:
    """The checkpoints of the trial that a run has locked; no other run adds any or deletes any.

    ``parent`` is the checkpoint that the run resumes from. ``on_delete`` gets the id of each checkpoint that the rule
    has deleted.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        policy: CheckpointPolicy,
        experiment: str = "",
        trial: str = "",
        parent: CheckpointContent | None = None,
        on_delete: Callable[[str], None] | None = None,
    ) -> None:
        self._storage = storage
        self._policy = policy
        self._names = (experiment, trial)
        self._on_delete = on_delete
        self._records: dict[str, CheckpointRecord] = {}
        self._written: list[str] = []  # by this run, and not deleted
        self._parent_id = None if parent is None else parent.name
        self._latest = 0.0 if parent is None else parent.time_s or 0.0

    def learn(self) -> None:
        """Find the checkpoints of earlier runs; none is deleted before this run has written one."""
        own = [
            info
            for info in self._storage.list_checkpoints()
            if (info.notes.experiment, info.notes.trial) == self._names
        ]
        self._records = {info.id: make_record(info, self._names[1], self._policy.metric) for info in own}
        self._latest = max([self._latest, *(record.order for record in self._records.values())])

    def describe_next(self, metric: float | None) -> dict[str, Any]:
        """Return the entries of the next checkpoint's ``metadata.json``: the ``time``, and the ``metric`` if any.

        The time, in seconds since 1970, grows even if the clock is set back.
        """
        time_s = max(time.time(), self._latest + 1e-3)
        if metric is None:
            return {"time": time_s}
        policy = self._policy
        described = {"name": policy.metric, "value": metric, "smaller_is_better": policy.smaller_is_better}
        return {"time": time_s, "metric": described}

    def add(self, checkpoint_id: str, steps_completed: int, order: float, metric: float | None) -> None:
        """Record a complete checkpoint, then delete those that need no longer be kept."""
        self._records[checkpoint_id] = CheckpointRecord(checkpoint_id, self._names[1], steps_completed, order, metric)
        self._latest = order
        self._written.append(checkpoint_id)
        self._delete_the_rest()

    def note_metric(self, steps_completed: int, metric: float) -> None:
        """Note the metric of a validation if the latest checkpoint is at the same batch without a metric.

        Before the run has written a checkpoint, the checkpoint that the run resumed from counts as the latest.
        """
        latest = max(self._records.values(), key=lambda record: record.order, default=None)
        if latest is None or latest.id not in (*self._written, self._parent_id):
            return
        if latest.steps_completed != steps_completed or latest.metric is not None:
            return
        try:
            is_noted = add_metric(self._storage, latest.id, self.describe_next(metric)["metric"])
        except errors.StorageError as e:
            logger.warning("The metric of checkpoint %s cannot be written into the metadata: %s", latest.id, e)
            return
        if is_noted:
            self._records[latest.id] = dataclasses.replace(latest, metric=metric)
            if self._written:
                self._delete_the_rest()

    def _delete_the_rest(self) -> None:
        if self._policy.retention is None:
            return
        for checkpoint_id in self._policy.choose_to_delete(self._records.values()):
            if checkpoint_id == self._parent_id and not self._written:
                continue  # what the run resumed from stays until it has written one
            try:
                self._storage.delete(checkpoint_id)
            except errors.CheckpointNotFound:
                logger.warning("Checkpoint %s was deleted by another process.", checkpoint_id)
            except errors.StorageError as e:
                # The new checkpoint is safe, and training must not fail because an old one could not be deleted.
                logger.warning("An old checkpoint cannot be deleted; the next save tries again: %s", e)
                continue
            del self._records[checkpoint_id]
            self._written = [one for one in self._written if one != checkpoint_id]
            if self._on_delete is not None:
                self._on_delete(checkpoint_id)

    def finish(self) -> None:
        """End the run: delete unneeded checkpoints, and raise a ``StorageError`` that names vanished checkpoints."""
        self._delete_the_rest()
        storage = self._storage
        if not self._written:
            return
        if storage.is_local:
            gone = [name for name in self._written if not storage.is_complete(name)]
        else:  # one listing
            with explain_errors("listing", storage.root):
                there = storage.root.list_names()
            gone = [name for name in self._written if name not in there]
        if gone:
            raise errors.StorageError(
                f"{len(gone)} checkpoints that this run has written to {storage} no longer exist: {', '.join(gone)}. "
                "Was the storage removed or unmounted, or were the checkpoints deleted by hand?"
            )


def add_metric(storage: CheckpointStorage, checkpoint_id: str, metric: dict[str, Any]) -> bool:
    """Add a metric to a checkpoint's metadata; return False if the metadata are gone, damaged, or have a metric."""
    info = storage.info(checkpoint_id)
    if not info.metadata or "metric" in info.metadata:
        return False
    content = to_json(with_entries(info.metadata, {"metric": metric})).encode()
    file = info.directory / METADATA_FILE
    with explain_errors("writing", file):
        file.write(content)
    return True
